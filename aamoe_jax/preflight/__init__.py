"""What a step will cost on a TPU that is not there: its memory, work, collectives and modelled time, from the compiler.

compile_apart (program.py, in a process of its own) -> the compiler's text
  -> hlo -> work, collectives, buffers -> summary (modelled time) -> report
"""
