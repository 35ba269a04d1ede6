"""The paper's networks and the data sets they are trained on."""
