"""Model zoo: own code, with torchvision's parameter names where torchvision has the model.

Empty of imports on purpose: ``blockflow.repository.zoo.catalog`` lists the models and imports torch
only when one is built.
"""
