#include "core/format.h"
