"""What to keep on one's own data: looks at it, tries the methods on it, and says which to use and how sure that is."""
