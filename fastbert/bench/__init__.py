"""The code behind `fastbert bench`: contestants, ceilings, timing, the report and its chart."""
