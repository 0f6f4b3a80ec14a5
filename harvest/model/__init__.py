"""Loading a model, naming its sites, capturing what they compute."""
