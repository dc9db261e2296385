"""One report of many measurements: read, joined, judged, compared and shown. No torch here."""
