"""Formulas, diagrams of graphs, and the HTML that notebooks and pages show."""
