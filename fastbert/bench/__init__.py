"""The code behind `fastbert bench` and `fastbert compare`: contestants, ceilings, timing, reports and charts."""
