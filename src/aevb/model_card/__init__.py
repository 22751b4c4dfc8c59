"""Model cards: what a run is, how good it is and where its limits are, as Markdown for hubs."""

from aevb.model_card.card import ModelCard, card_of, card_of_run, card_of_table

__all__ = ["ModelCard", "card_of", "card_of_run", "card_of_table"]
