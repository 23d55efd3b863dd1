"""How Spark-Mini is made: python -m training.train. Not part of the installed package."""
