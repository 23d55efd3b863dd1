"""Questions with known answers for Spark-Mini: made endlessly, asked of a model, and scored."""
