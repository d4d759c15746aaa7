"""The page as a file, and as a person with a browser sees it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from aamoe_jax.analysis.inspection import CONTEXT, EXPERT, LOCAL
from aamoe_jax.analysis.inspection_page import embedded_json, glyphs, page_data, render
from aamoe_jax.data import ByteTokenizer
from tests.aamoe.helpers import model_config
from tests.analysis.helpers import NASTY, inspected

SOURCE = "<b>\"a\" & 'b'</b>.py"


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    """What the page's script reads, after its way through JSON."""
    config = model_config(beta=2.0)
    made = page_data(
        inspected(), config.aamoe, ByteTokenizer(), source=SOURCE, facts=[("model", "small")], notes=["<i>"]
    )
    return json.loads(json.dumps(made))


class TestGlyphs:
    def test_characters_are_told_from_their_parts_and_from_other_bytes(self):
        pieces = [b"a", *(bytes([byte]) for byte in "é€".encode()), b"\xff", b"\n", "ü ".encode(), b""]
        texts, forms = glyphs(pieces)
        assert texts == ["a", "é", "a9", "€", "82", "ac", "ff", "\n", "ü ", ""]
        assert forms == ["text", "head", "tail", "head", "tail", "tail", "byte", "text", "text", "text"]

    def test_a_character_that_is_cut_off_is_bytes(self):
        assert glyphs([b"\xe2", b"\x82"]) == (["e2", "82"], ["byte", "byte"])

    def test_a_piece_with_bytes_among_text_is_bytes_altogether(self):
        assert glyphs([b"ab\xff"]) == (["61 62 ff"], ["byte"])


class TestFile:
    def test_slots_are_the_inspection(self, data):
        found = inspected()
        for index, layer in enumerate(data["layers"]):
            assert layer["spent"] == found.spent[index].tolist()
            assert len(layer["kind"]) == len(layer["mass"]) == sum(layer["spent"])
            used = found.kind[index] >= 0
            assert layer["kind"] == "".join("lce"[kind] for kind in found.kind[index][used])
            np.testing.assert_allclose(layer["probability"], found.probability[index][used], atol=6e-5)
            np.testing.assert_allclose(layer["mass"], found.mass[index][used], atol=6e-5)
            for place, length, kind, start, expert in zip(
                layer["place"], layer["length"], found.kind[index][used], found.start[index][used],
                found.expert[index][used], strict=True,
            ):  # fmt: skip
                assert (place, length > 0) == ((expert, False) if kind == EXPERT else (start, True))
        assert data["bits"][0] is None
        assert data["bits"][5] == pytest.approx(found.bits[5], abs=1e-3)
        assert data["names"]

    def test_the_page_holds_its_data_and_loads_nothing(self, data):
        page = render(data)
        (embedded,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
        assert json.loads(embedded) == data
        assert page.count("<script") == page.count("</script>") == 2
        for loads in ("http://", "https://", "src=", "@import", "url(", "fetch(", "XMLHttpRequest", "innerHTML"):
            assert loads not in page.replace(embedded, ""), loads
        assert "<b>" not in page
        assert "{{" not in page.replace(embedded, "")

    def test_json_cannot_leave_its_element(self):
        text = embedded_json({"a": "</script><!--\u2028&"})
        assert not set("<>&\u2028") & set(text)
        assert json.loads(text) == {"a": "</script><!--\u2028&"}
        with pytest.raises(ValueError, match="JSON"):
            embedded_json({"a": float("nan")})

    def test_its_size_grows_with_what_was_given_alone(self, data):
        slots = sum(len(layer["kind"]) for layer in data["layers"])
        tokens = len(data["text"])
        assert len(render(data)) - len(render(data | {"layers": []})) < 40 * slots + 40 * tokens


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    """A headless Chromium with its driver, as installed; nothing is downloaded."""
    names = ("chromium", "chromium-browser", "google-chrome")
    binary, driver = next(filter(None, map(shutil.which, names)), None), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("no Chromium with chromedriver on the path: the page is not tried in a browser")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    yield chrome
    chrome.quit()


@pytest.fixture(scope="module")
def address(data, tmp_path_factory) -> str:
    path: Path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(render(data), encoding="utf-8")
    return path.as_uri()


class TestBrowser:
    @pytest.fixture(autouse=True)
    def page(self, browser, address) -> Iterator[None]:
        """The page, opened afresh; whatever was done with it, the console stays silent and nothing is requested."""
        self.browser = browser
        browser.get_log("performance")
        browser.get(address)
        yield
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        assert browser.get_log("browser") == []
        events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        asked = [
            event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"
        ]
        assert [url for url in asked if url != address and not url.startswith("data:")] == []

    def resize(self, width: int, height: int = 800) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def all(self, selector: str) -> list[WebElement]:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def token(self, index: int) -> WebElement:
        return self.all(".t")[index]

    def key(self, *keys: str) -> None:
        ActionChains(self.browser).send_keys(*keys).perform()

    def script(self, body: str) -> Any:
        return self.browser.execute_script(f"const all = (s) => [...document.querySelectorAll(s)]; return {body}")

    def lit(self, kind: str) -> list[int]:
        return self.script(f"all('.t.lit.is-{kind}').map((t) => Number(t.dataset.token))")

    def grounds(self) -> list[str]:
        return self.script("all('.t').map((t) => getComputedStyle(t).backgroundColor)")

    def chosen_layer(self) -> str:
        return self.script("document.querySelector('#layers [aria-checked=true]').textContent")

    def assert_shows(self, token: int, layer: int) -> None:
        """The table and the marks in the text are this token's in this layer."""
        found = inspected()
        used = found.kind[layer, token] >= 0
        kinds = found.kind[layer, token][used]
        rows = self.script("all('#pane-token .resource').map((row) => [...row.cells].map((cell) => cell.textContent))")
        assert len(rows) == found.spent[layer, token] == used.sum()
        for rank, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
            chunk = found.start[layer, token, rank] // found.chunk_size
            name = {LOCAL: "window", CONTEXT: f"chunk {chunk}", EXPERT: f"expert {found.expert[layer, token, rank]}"}
            assert row[0] == str(rank + 1)
            assert row[1].startswith(name[int(kind)])
            for shown, share in ((row[2], found.probability), (row[3], found.mass)):
                assert float(shown.strip("< %")) == pytest.approx(100 * share[layer, token, rank], abs=0.51)
        for name, kind in (("local", LOCAL), ("context", CONTEXT)):
            slots = np.flatnonzero(found.kind[layer, token] == kind)
            spans = [range(found.start[layer, token, slot], found.stop[layer, token, slot]) for slot in slots]
            assert self.lit(name) == sorted(index for span in spans for index in span)

    def rich_token(self, layer: int = 0) -> int:
        """A token that was given every kind of resource."""
        kind = inspected().kind[layer]
        return int(np.flatnonzero(np.all([(kind == k).any(-1) for k in (LOCAL, CONTEXT, EXPERT)], axis=0))[-1])

    def test_a_hostile_passage_is_text(self, data):
        assert len(self.all(".t")) == len(data["text"])
        shown = self.script("document.getElementById('passage').textContent")
        assert "</script><b>bold</b> <!-- &amp; {{data}} " in shown
        assert "éa9€82ac \\xff\\x07→\t␍↵\nJSON" in shown
        assert self.all("#passage b, #source b, #notes i") == []
        assert self.browser.title == f"{SOURCE} · where the budget went"
        assert self.all("#source")[0].text == SOURCE

    def test_hovering_a_token_shows_what_it_was_given(self):
        token = self.rich_token()
        ActionChains(self.browser).move_to_element(self.token(token)).perform()
        self.assert_shows(token, layer=0)
        assert self.script("getComputedStyle(document.querySelector('.t.lit')).boxShadow") != "none"
        ActionChains(self.browser).move_to_element(self.all("h1")[0]).perform()
        assert self.all(".t.lit, .t.active") == []

    def test_a_pinned_token_stays_while_the_layer_changes(self):
        token = self.rich_token()
        self.token(token).click()
        before = self.grounds()
        self.all("#layers button")[1].click()
        assert self.grounds() != before
        self.assert_shows(token, layer=1)
        ActionChains(self.browser).move_to_element(self.token(3)).perform()
        self.assert_shows(token, layer=1)
        self.token(token).click()
        self.key(Keys.ESCAPE)
        assert self.all(".t.active.lit") == []

    def test_colours_follow_the_layer_and_nothing_given_has_none(self):
        for layer in range(2):
            spent, grounds = inspected().spent[layer], self.grounds()
            colours = {count: {grounds[i] for i in np.flatnonzero(spent == count)} for count in np.unique(spent)}
            assert all(len(found) == 1 for found in colours.values())
            assert colours.pop(0) == {"rgba(0, 0, 0, 0)"}
            tones = [luminance(colour) for (colour,) in colours.values()]  # by count, as np.unique sorts them
            assert tones == sorted(tones, reverse=True)
            assert len(set(tones)) > 4
            self.key(Keys.ARROW_RIGHT)

    def test_the_keyboard_reaches_everything(self):
        self.script("document.querySelector('.t').focus()")
        self.key(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
        assert self.script("document.activeElement.dataset.token") == "2"
        self.assert_shows(2, layer=0)
        self.key(Keys.ENTER, Keys.ARROW_LEFT)
        assert self.chosen_layer().startswith("Layer 1")
        self.assert_shows(2, layer=1)
        self.key(Keys.ARROW_RIGHT)
        ActionChains(self.browser).key_down(Keys.SHIFT).send_keys(Keys.ARROW_DOWN).key_up(Keys.SHIFT).perform()
        assert self.script("document.activeElement.dataset.token") == str(len(NASTY))
        assert "resource" in self.script("document.activeElement.ariaLabel")
        self.key(Keys.ESCAPE)
        assert self.script("document.querySelector('.pin').ariaPressed") == "false"
        self.all("#tab-token")[0].click()
        self.key(Keys.ARROW_RIGHT)
        assert self.script("document.activeElement.id") == "tab-map"
        assert self.chosen_layer().startswith("Layer 0")

    def test_an_expert_shows_its_tokens(self, data):
        self.all("#tab-experts")[0].click()
        use = data["layers"][0]["uses"][0]
        ActionChains(self.browser).move_to_element(self.all("#pane-experts tr.pick")[0]).perform()
        users = np.flatnonzero((inspected().expert[0] == use["expert"]).any(-1)).tolist()
        assert self.lit("expert") == users
        assert len(users) == use["tokens"]
        self.all("#pane-experts tr.pick")[0].click()
        ActionChains(self.browser).move_to_element(self.token(0)).perform()
        assert self.lit("expert") == users

    def test_repetition_is_marked(self, data):
        self.all("#tab-copies")[0].click()
        self.all("#pane-copies tr.pick")[0].click()
        assert self.lit("copy") == [token for token, n in enumerate(data["repeat"]) if n >= 4] != []

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_tokens_are_readable(self, scheme):
        """Contrast of letters to their ground at every step of the scale (WCAG AA asks for 4.5)."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        card = self.script("getComputedStyle(document.querySelector('.card')).backgroundColor")
        assert (luminance(card) > 0.5) == (scheme == "light")
        pairs = {(card, self.script("getComputedStyle(document.querySelector('.legend .none')).color"))}
        for step in range(1, 9):
            self.script(f"all('.t')[0].setAttribute('data-level', {step})")
            style = self.script("[getComputedStyle(all('.t')[0])].map((s) => [s.backgroundColor, s.color])[0]")
            pairs.add(tuple(style))
        assert len(pairs) == 9
        for ground, ink in pairs:
            low, high = sorted((luminance(ground), luminance(ink)))
            # What was given nothing may step back a little.
            assert (high + 0.05) / (low + 0.05) >= (4.0 if ground == card else 4.5), (ground, ink)

    @pytest.mark.parametrize("width", [340, 700, 1000, 1900])
    def test_nothing_sticks_out(self, width):
        self.resize(width)
        for tab in ("token", "map", "experts", "copies"):
            self.script(f"document.getElementById('tab-{tab}').click()")
            if tab == "token":
                self.script(f"all('.t')[{self.rich_token()}].click()")
                assert self.all("#pane-token .resource")
            assert self.script("document.documentElement.scrollWidth") <= width
            pane = self.all(f"#pane-{tab}")[0]
            # Seven columns of figures may scroll on the smallest of screens.
            assert tab == "copies" or pane.get_property("scrollWidth") <= pane.get_property("clientWidth")
        self.all("#side")[0].click()
        assert self.script("document.documentElement.scrollWidth") <= width

    @pytest.mark.parametrize("side", [False, True])
    def test_words_are_broken_only_where_no_line_holds_them(self, data, side):
        self.resize(420)
        if side:
            self.all("#side")[0].click()
        text = "".join(text if len(text) == 1 else "#" for text in data["text"])
        words = [match.span() for match in re.finditer(r"[A-Za-z]{2,20}", text)]
        lines = self.script("all('.t').map((t) => t.getClientRects().length === 1 ? t.offsetTop : -1)")
        assert len(set(lines[: len(text)])) > 4
        assert len(words) > 10
        for start, stop in words:
            assert len(set(lines[start:stop])) == 1, text[start:stop]

    def test_layers_stand_side_by_side(self, data):
        one = []
        for _ in range(2):
            one.append(self.grounds())
            self.key(Keys.ARROW_RIGHT)
        self.all("#side")[0].click()
        count = len(data["text"])
        assert self.grounds() == one[0] + one[1]
        token = self.rich_token()
        ActionChains(self.browser).move_to_element(self.token(count + token)).perform()
        assert self.chosen_layer().startswith("Layer 1")
        active = self.script("all('.t').flatMap((t, index) => t.classList.contains('active') ? [index] : [])")
        assert active == [token, count + token]
        for layer in range(2):
            marked = self.script(f"all('[data-panel=\"{layer}\"] .is-context').map((t) => Number(t.dataset.token))")
            slots = np.flatnonzero(inspected().kind[layer, token] == CONTEXT)
            found = inspected()
            spans = [range(found.start[layer, token, slot], found.stop[layer, token, slot]) for slot in slots]
            assert marked == sorted(index for span in spans for index in span)
        self.token(token).click()
        assert self.chosen_layer().startswith("Layer 0")
        self.all("#side")[0].click()
        self.assert_shows(token, layer=0)

    def test_the_map_shows_where_every_budget_went(self, data):
        found = inspected()
        self.resize(1280, 1800)
        self.all("#tab-map")[0].click()
        canvas = self.all("#pane-map canvas")[0]
        experts = sorted(use["expert"] for use in data["layers"][0]["uses"])
        columns = found.num_chunks + len(experts)
        self.script("window.map = document.querySelector('canvas')")
        pixels = self.script("[...map.getContext('2d').getImageData(0, 0, map.width, map.height).data]")
        painted = np.array(pixels).reshape(len(data["text"]), -1, columns, 4, 4)[:, 0, :, 0, 3] > 0
        for token, row in enumerate(painted):
            resources = found.resource[0, token][found.kind[0, token] >= 0].tolist()
            chunks = {one for one in resources if one < found.num_chunks}
            others = {found.num_chunks + experts.index(one - found.num_chunks) for one in set(resources) - chunks}
            assert set(np.flatnonzero(row)) == chunks | others, token
        token = self.rich_token()
        rank = int(np.flatnonzero(found.kind[0, token] == EXPERT)[0])
        expert = int(found.expert[0, token, rank])
        box, column = canvas.rect, found.num_chunks + experts.index(expert)
        place = (column + 0.5) / columns * box["width"] - box["width"] / 2
        down = (token + 0.5) / len(data["text"]) * box["height"] - box["height"] / 2
        ActionChains(self.browser).move_to_element_with_offset(canvas, place, down).perform()
        said = self.all("#pane-map .readout")[0].text
        assert said.startswith(f"Token {token} (")
        assert f"expert {expert}, rank {rank + 1}, " in said
        assert self.lit("expert") == np.flatnonzero((found.expert[0] == expert).any(-1)).tolist()
        ActionChains(self.browser).click().perform()
        self.assert_shows(token, layer=0)
        # With another token pinned, what the map points at is read out, and that token's resources stay marked.
        other = next(one for one in range(len(found.kind[0])) if one != token and found.kind[0, one, rank] == EXPERT)
        self.script(f"all('.t')[{other}].click()")
        self.all("#tab-map")[0].click()
        canvas = self.all("#pane-map canvas")[0]
        ActionChains(self.browser).move_to_element_with_offset(canvas, place, down).perform()
        assert self.all("#pane-map .readout")[0].text.startswith(f"Token {token} (")
        assert self.lit("expert") == []


def luminance(colour: str) -> float:
    """Relative luminance of a computed colour, `rgb(r, g, b)`."""
    channels = np.array([int(channel) for channel in re.findall(r"\d+", colour)[:3]]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))
