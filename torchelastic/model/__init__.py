"""What `ModelState` is made of: wrapping the module for a group, moving its state to who lacks it."""
