"""What is done to a live model, one module for each technique.

See docs/adding-a-technique.md. The planner's half of each technique is in C++,
src/memscale/core/techniques.
"""

from memscale.techniques.use_cache import as_wrapped

__all__ = ["as_wrapped"]
