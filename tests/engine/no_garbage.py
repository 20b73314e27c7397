"""To be imported before large libraries: there is no garbage while they are imported, and looking for it
takes as long as the imports."""

import gc

gc.disable()
