"""What every mixer costs: FLOPs, activation bytes, cache bytes, for a prompt and for one more token (DEC-13 to DEC-15).

`published`: the formulas as printed, their slips named. `exact`: what this code does, in closed form. `compiled`: what
the compiler says of the same. `report`: the three side by side.
"""
