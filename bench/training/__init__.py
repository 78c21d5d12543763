"""`make train-demo`: a small policy learns through real containers, the gateway and the experience store."""
