"""Readers of file formats: text, images, masks, COCO's annotations, stereo pairs, TIFF; all check what they read."""
