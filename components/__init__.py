"""What runs inside pods: one command per stage, and the frames that the stages join."""
