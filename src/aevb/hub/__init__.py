"""Share runs by a model hub: ``push`` sends a run, and ``pull`` fetches and checks one.

``contents`` lists what would be sent. The training data never are.
"""

from aevb.hub.contents import Item, contents
from aevb.hub.transfer import Pushed, pull, push

__all__ = ["Item", "Pushed", "contents", "pull", "push"]
