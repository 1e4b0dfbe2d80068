"""Tools of the repository, which no package ships."""
