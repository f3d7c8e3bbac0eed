"""Elastic training of a ResNet on a folder of images, and the demo that kills one of its workers."""
