"""What a training state consists of: how a failed step is undone, and what a worker that joins gets.

For undoing, `module_structure.py` has a module's flags, slots, hooks and attributes, `attributes.py` the values of any
object, and `generators.py` the random numbers. Each copies what is there before a step (`copy`), and puts it back after
a failed one (`put`): first which object is where, then its shape, then its bytes. `put` does not raise for anything
that a step can do. For joining, `module_values.py` has what a module has besides its weights and `optimizer_values.py`
an optimizer's state and groups, by the names that `names.py` gives. For checkpoints, `module_state.py` has a module's
`state_dict` and `stored_module.py` what is stored beside it. tests/contracts/test_inventory.py, test_newcomers.py and
test_restarts.py prove by a census what is undone, sent and stored; what is not is listed there, and in docs/state.md.
"""
