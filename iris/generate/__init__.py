"""Text from a real model on local ranks: ``python -m iris.generate --model smollm2 --ranks 3
--prompt "..."``.
"""
