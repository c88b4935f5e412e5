"""What must not stop a run, or be believed by it: processes that die, full disks, hostile answers."""
