"""A stand-in for colchis.components: commands whose whole purpose is to end in some way."""
