"""What a training state consists of; so far what a failed step may have changed beside weights, and how it is undone.

`module_structure.py` has a module's flags, slots, hooks and attributes, `attributes.py` the values of any object, and
`generators.py` the random numbers. Each copies what is there before a step (`copy`), and puts it back after a failed
one (`put`): first which object is where, then its shape, then its bytes. `put` does not raise for anything that a step
can do. tests/contracts/test_inventory.py proves by a census what is undone; what is not is listed there, and in
docs/state.md.
"""
