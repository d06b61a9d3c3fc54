"""One file a collective; each function is one algorithm over a Link or a Segment."""
