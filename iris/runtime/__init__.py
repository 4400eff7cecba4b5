"""What runs under every program: ranks, the symmetric heap, groups and barriers, and the
launcher.
"""
