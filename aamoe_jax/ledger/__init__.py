"""What every mixer costs: FLOPs, activation bytes, cache bytes, for a prompt and for one more token (DEC-13 to DEC-15).

What this code does is said by the `costs` of every mixer. `published`: the formulas as printed, their slips named.
`compiled`: what the compiler says of the same. `report`: the three side by side.
"""
