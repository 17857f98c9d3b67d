"""What a diagnosis or a conversion of a model would cost on this machine, from the model's config alone."""
