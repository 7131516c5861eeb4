"""What routers report about predictions, judged and acted upon."""
