// The decoder layers of a model, its last norm, and what a step hands them; plain C layout, as Python
// describes it.
#pragma once

#include "kernels.h"

// Linear layers of one input whose outputs lie side by side. Rows, input and output are set when it
// runs.
struct CbgenProduct {
  int64_t count;
  int64_t offsets[3];  // first column of each part's output
  CbgenLinear parts[3];
};

struct CbgenDecoderLayer {
  const float* attention_norm;  // [hidden_size]
  const float* mlp_norm;        // [hidden_size]
  const float* query_norm;      // [head_dim] or null
  const float* key_norm;        // [head_dim] or null
  CbgenProduct query_key_value;
  CbgenProduct output;
  CbgenLinear gate;
  CbgenLinear up;
  CbgenProduct down;
  CbgenCache cache;
  int64_t group;       // of the step's groups
  int64_t rotary_dim;  // 0 = not rotated
  float scaling;
};

struct CbgenDecoder {
  const CbgenDecoderLayer* layers;
  int64_t num_layers;
  const float* last_norm;  // [hidden_size]
  int64_t hidden_size;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t query_offset;
  int64_t key_offset;
  int64_t value_offset;
  int64_t heads_width;  // of a row of queries, keys and values
  int64_t intermediate_size;
  float epsilon;
};

// What the layers of one group share in a step.
struct CbgenStepGroup {
  const int64_t* block_tables;  // [requests][block_table_stride]
  int64_t block_table_stride;
  const int64_t* slots;  // [tokens]
  int64_t window;
  int64_t chunk;
};

struct CbgenStep {
  float* hidden;  // [tokens][hidden_size] before the layers; anything afterwards
  int64_t tokens;
  const float* cos;  // [tokens][rotary_dim]
  const float* sin;
  const int64_t* query_starts;  // [requests + 1]
  const int64_t* key_lens;      // [requests]
  int64_t requests;
  const CbgenStepGroup* groups;
  const int64_t* wanted;  // [num_wanted] tokens whose hidden states are wanted, ascending
  int64_t num_wanted;
  float* output;  // [num_wanted][hidden_size] behind the last norm
  double* seconds;  // [CBGEN_PARTS], added to
};

// Parts whose time is measured.
enum CbgenPart { CBGEN_PRODUCTS, CBGEN_ATTENTION, CBGEN_SMALL, CBGEN_PARTS };
