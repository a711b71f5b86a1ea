"""What `sppo check` does: whether this machine computes, copies and sends right, and how fast."""
