#include <gtest/gtest.h>
#include "megatron/pipeline_parallel/executor.h"
