"""The demo: three tasks on real images, trained, exported, served and measured in one go."""
