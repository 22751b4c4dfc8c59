"""Model cards: what a run is, how good it is and where its limits are, as Markdown for hubs."""

from aevb.model_card.card import ModelCard
from aevb.model_card.card import card_of as card_of
from aevb.model_card.card import card_of_run as card_of_run
from aevb.model_card.card import card_of_table as card_of_table

__all__ = ["ModelCard"]  # what users meet; runs and commands make the cards
