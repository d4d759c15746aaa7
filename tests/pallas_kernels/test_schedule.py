"""The reader of the compiler's schedules, on a listing thinned from a real one."""

import pytest

from pallas_kernels import schedule

LISTING = """\
= control target key start
LB: loop body
= control target key end
     0   :  { %s15665_s18 = smov [#allocation6] /* materialized constant */ } /* entry bundle: %kernel.1 */
  0x16   :  { %13284 = sbr.rel (%p13325_p0) target = $region1410 }
  0x1f   :  {  %s15764_s11 = smov 0 /* copy for cssa */ } /* End region 1411 */
  0x20 LB: > {  %s15611_s23 = sphi %s15746_s23, %s20608_s23 /* phi copy */ } /* Start region 1416 :: Start region 37 */
  0x5b   : > { %355 = sbr.rel (%p15911_p12) target = $region40 /* a comment of
second_minor_factor: 1 */ } /* End region 37 :: End region 38 */
  0x73   : > { %442 = sbr.rel (%p13330_p7) target = $region64 } /* Start/End empty region 61 :: Start region 62 */
  0x74   :  {}
  0x75   :  {}
  0x76   :  {}
  0x77   :  {}
  0x78 LB: >> {  %s15651_s5 = sphi %s15649_s5, %s448_s5 /* phi copy */ } /* Start region 1372 :: Start region 69 */
  0x79   : >> {  %p445_p3 = scmp.ge.s32.totalorder %s448_s5, 2048 /* loop exit test */ }
  0x7b   : > { %447 = sbr.rel (!%p445_p3) target = $region1372 }
  0x7f   :  {} /* End region 63 :: End region 74 :: End region 1382 */
  0x88 PF: > { %s16029_s20 = smov 0 /* copy for cssa */ } /* Start/End empty region 64 :: Start region 1389 */
  0x89 LB: >> {  %s15659_s20 = sphi %s16029_s20, %s466_s20 /* phi copy */ } /* Start region 1394 :: Start region 83 */
  0x92   : >> { %473 = vst [vmem:[%s16053_s26] sm:$0xff] /*vst_source=*/%v470_v2   }
  0xb8   : >> {  %s466_s20 = sadd.s32 4, %s15659_s20 }
  0xb9   : >> {  %p463_p7 = scmp.ge.s32.totalorder %s466_s20, 64 /* loop exit test */ }
  0xbb   : >> {  %465 = sbr.rel (!%p463_p7) target = $region1394   }
  0xc0   :  {}
  0xe2   : > { %v924_v25 = vld [vmem:[#allocation2 + $0xe80] ss:$8 sm:$0xf0] }
 0x10a   : > { %v700_v31 = vld [vmem:[#allocation2 + $0x80] ss:$8 sm:$0xf0] }
 0x132   : > { %v860_v1 = vld [vmem:[#allocation2 + $0xa80] ss:$8 sm:$0xf0]   }
 0xbba PF: > {  %s20608_s23 = smov %s15615_s24 } /* Start/End empty region 40 :: Start region 4 */
 0xbc3   : > {  %45 = sbr.rel (!%p42_p0) target = $region1416 }
 0xbc8 PF:  { %12741 = vsyncpa [#allocation10], 1 } /* Start/End empty region 1410 */
"""
USAGE = """\
== CAPACTIY:
MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    4     3     4     2     1     3     3     1     1     2
== UTILIZATION:
3 1 2 0 0 1 0 1 0 0
1 0 1 0 0 0 0 1 1 0
"""


def usage(bundles: int) -> str:
    """USAGE for as many bundles: the first fills three MXU slots and a store, the others one MXU slot and a spill."""
    head, rows = USAGE.splitlines()[:4], USAGE.splitlines()[4:]
    return "\n".join([*head, rows[0], *[rows[1]] * (bundles - 1)])


def test_loops_their_trips_and_what_is_skipped():
    loops, issued = schedule.parse_loops(LISTING)
    assert len(issued) == LISTING.count("{")
    grid, zeroing, gather = loops
    assert (grid.depth, grid.trips, grid.conditional) == (1, None, False)
    assert (zeroing.depth, zeroing.bundles, zeroing.trips) == (2, 2, 2048)
    assert zeroing.conditional
    assert (gather.depth, gather.bundles, gather.trips, gather.conditional) == (2, 6, 16, False)
    assert sum(issued) == grid.bundles + 6 * 16
    assert set(issued) == {0, 1, 16}


def test_a_loop_in_the_delay_slots_of_the_branch_around_it_is_skipped_with_it():
    lines = LISTING.splitlines()
    first_empty = lines.index("  0x74   :  {}")
    loops, issued = schedule.parse_loops("\n".join(lines[:first_empty] + lines[first_empty + 2 :]))
    assert [loop.conditional for loop in loops] == [False, True, False]
    assert set(issued) == {0, 1, 16}


def test_a_loop_in_a_loop_that_is_skipped_is_skipped_with_it():
    inner = [
        "  0x8a LB: >>> {  %s7 = sphi %s8, %s9 }",
        "  0x8b   : >>> {  %p7 = scmp.ge.s32.totalorder %s7, 100 /* loop exit test */ }",
    ]
    lines = LISTING.splitlines()
    begins = next(i for i, line in enumerate(lines) if line.startswith("  0x79 "))
    nested = "\n".join(lines[:begins] + inner + lines[begins:])
    loops, issued = schedule.parse_loops(nested)
    assert [(loop.depth, loop.conditional) for loop in loops] == [(1, False), (2, True), (3, True), (2, False)]
    assert sum(issued) == sum(schedule.parse_loops(LISTING)[1])
    assert schedule.whole_cycles(nested) == schedule.whole_cycles(LISTING)


def test_slots_are_shares_of_the_cycles_of_a_step():
    capacity, used = schedule.parse_slots(USAGE)
    assert (capacity["MXU"], capacity["VSTORE"], capacity["SALU"]) == (4, 1, 2)
    assert [row["MXU"] for row in used] == [3, 1]
    bundles = LISTING.count("{")
    read = schedule.parse(LISTING, usage(bundles))
    assert (read.bundles, read.spills) == (bundles, bundles - 1)
    # The first bundle, the only one with three MXU slots, is before the grid's loop, which no step issues again.
    assert (read.slots["MXU"], read.slots["VSTORE"], read.slots["SALU"]) == (0.25, 1.0, 0.0)
    assert read.binding == ("VSTORE", 1.0)


@pytest.mark.parametrize("begins", [0, 40])
def test_of_two_copies_of_the_work_a_step_issues_one(begins):
    """Even steps jump over the second copy, odd ones over the first; most steps over what begins a window, however long
    that is."""
    kind = "vmatmul.bf16.gmra.mxu0" if begins else "vadd"
    copy = [f" 0x{i:x}   : > {{ %v{i} = {kind} %v1, %v2 }}" for i in range(40)]
    window = [f" 0x{i:x}   : > {{ %v{i} = vld [vmem:%s1] }}" for i in range(begins)]
    lines = [
        "  0x0 LB: > { %s1 = sphi %s2, %s3 }",
        "  0x1   : > { %1 = sbr.rel (%p1) target = $region4 }",
        *window,
        "  0x2   : > { %1 = sbr.rel (%p1) target = $region5 } /* Start/End empty region 4 */",
        *copy,
        "  0x3   : > { %2 = sbr.rel (%p2) target = $region6 } /* Start/End empty region 5 */",
        *copy[:36],
        "  0x4   : > { %v3 = vadd %v1, %v2 } /* Start/End empty region 6 */",
        "  0x5   : > { %45 = sbr.rel (!%p42) target = $region1416 }",
    ]
    _, issued = schedule.parse_loops("\n".join(lines))
    assert sum(issued[2 : 2 + begins]) == (schedule.DELAY_SLOTS if begins else 0)
    assert sum(issued[3 + begins : 43 + begins]) == 40
    assert sum(issued[44 + begins : 80 + begins]) == schedule.DELAY_SLOTS


def test_a_branch_over_all_products_guards_the_work_however_short_that_is():
    """Where it is less than half of the kernel: what is longer has no products."""
    work = [f" 0x{i:x}   : > {{ %v{i} = vmatmul.bf16.gmra.mxu0 %v1, %v2 }}" for i in range(20)]
    rest = [f" 0x{i:x}   : > {{ %v{i} = vld [vmem:%s1] }}" for i in range(60)]
    lines = [
        "  0x0 LB: > { %s1 = sphi %s2, %s3 }",
        "  0x1   : > { %1 = sbr.rel (%p1) target = $region5 }",
        *work,
        "  0x2   : > { %2 = sbr.rel (%p2) target = $region6 } /* Start/End empty region 5 */",
        *rest,
        "  0x3   : > { %45 = sbr.rel (!%p42) target = $region1416 } /* Start/End empty region 6 */",
    ]
    _, issued = schedule.parse_loops("\n".join(lines))
    assert sum(issued[2:22]) == 20
    assert sum(issued[23:83]) == schedule.DELAY_SLOTS


def test_notes_of_two_kernels_do_not_go_together():
    with pytest.raises(ValueError, match="27 bundles, but the slots of 3"):
        schedule.parse(LISTING, usage(3))


def test_a_kernel_is_found_by_its_name_alone(tmp_path):
    for name in ("17-kernel.1-72-final_bundles.txt", "17-kernel_too-72-final_bundles.txt"):
        (tmp_path / name).write_text(LISTING)
    (tmp_path / "17-kernel.1-71-schedule-analysis_final_bundles.txt").write_text("")
    (tmp_path / "17-kernel.1-70-final_hlo-static-per-bundle-utilization.txt").write_text(usage(LISTING.count("{")))
    assert schedule.read(tmp_path, "kernel").spills == LISTING.count("{") - 1
    with pytest.raises(FileNotFoundError, match=r"\*-nothing-\*.*, found 0"):
        schedule.read(tmp_path, "nothing")


def test_whole_cycles_are_bundles_times_the_trips_of_all_loops_around_them():
    """Of the listing: the grid, whose trips only the run knows, once; 16 trips of the gather in it; what a branch may
    skip not at all."""
    _, issued = schedule.parse_loops(LISTING)
    outside = 3 + 1  # before the grid and after it
    assert schedule.whole_cycles(LISTING) == sum(issued) + outside
    end = " 0xbc3   : > {  %45 = sbr.rel"
    counted = " 0xbc2   : > {  %p1_p1 = scmp.ge.s32.totalorder %s1_s1, 5 /* loop exit test */ }\n"
    bounded = LISTING.replace(end, counted + end)
    assert schedule.whole_cycles(bounded) == 5 * (sum(issued) + 1) + outside


def test_the_test_of_a_loop_may_stand_in_the_loop_that_ends_it():
    """It then runs where that one's own test says that it is over."""
    after = "  0xbb   : >> {  %465 = sbr.rel (!%p463_p7)"
    moved = "%s1_s1 = sadd.s32 (%p463_p7), 2, %s2_s2  ;;  %p1_p1 = scmp.ge.s32.totalorder (%p463_p7), %s1_s1, 10"
    listing = LISTING.replace(after, f"  0xba   : >> {{  {moved} /* loop exit test */ }}\n{after}")
    loops, issued = schedule.parse_loops(listing)
    assert [loop.trips for loop in loops] == [5, 2048, 16]
    assert schedule.whole_cycles(listing) == 5 * sum(issued) + 3 + 1
