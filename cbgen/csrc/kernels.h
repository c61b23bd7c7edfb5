// What the parts of the kernel library share: arguments of the kernels and the table of one
// instruction set. Plain C layout, no libraries, so that code compiled for one instruction set
// never reaches a machine that lacks it through an inlined library function.
#pragma once

#include <cstdint>

enum CbgenFormat : int32_t {
  CBGEN_FLOAT32 = 0,
  CBGEN_BFLOAT16 = 1,
  CBGEN_FLOAT16 = 2,
  CBGEN_INT8 = 3,  // packed weights alone
};

// Columns of a packed panel. The packed form is the same for every instruction set:
// [ceil(columns / 32)][depth][32], columns beyond the last one hold zeros. In a bfloat16 panel the
// 32 values of a depth are interleaved, column i beside column 16 + i, so that one shift and one
// mask widen a vector of them to float32; the other formats keep columns in order.
constexpr int64_t CBGEN_PANEL = 32;

// An int8 panel is [padded depth / 4][32][4] bytes, each value + 128, then 32 float32 scales, one a
// column. The depth is padded with zeros to a multiple of 64, and each 64 depths are multiplied by a
// Hadamard matrix, in the weights and in the rows alike: the products stay what they were, and what
// stands out in one depth is spread over 64, so that one scale serves a row (Ashkboos et al. 2024,
// "QuaRot").
constexpr int64_t CBGEN_ROTATION = 64;
// Bytes before the values of a quantized row.
constexpr int64_t CBGEN_INT8_HEADER = 64;

// What stands there. The lengths are those of the row as it came, at least; both are infinite if a
// value of the row is not finite.
struct CbgenInt8Row {
  float scale;     // NaN if a value of the row is not finite
  int32_t offset;  // sum of the values times 128, which weights stored as value + 128 add
  float norm;      // length of the row
  float error;     // length of what rounding took from it
};

// output[r][n] = sum over k of input[r][k] * weight[n][k] (+ bias[n]), all in float32.
struct CbgenLinear {
  const float* input;  // [rows][depth], rows input_stride apart
  int64_t rows;
  int64_t input_stride;
  const void* weights;  // packed panels
  int64_t depth;
  int64_t columns;
  const float* bias;  // [columns] or null
  float* output;      // [rows][columns], rows output_stride apart
  int64_t output_stride;
  int32_t format;  // CbgenFormat of the weights
  const void* next;  // weights of this format that are probably wanted after these; or null
};

// The largest column of each row of a product, without computing most of it: int8 products, and
// bounds of what rounding has changed in them, rule out all but a few panels, and those are computed.
struct CbgenBestColumns {
  CbgenLinear linear;   // without bias and output; all its weights are finite
  const void* rounded;  // the weights once more, int8
  const float* errors;  // [panels][2][32]: lengths of what rounding took from a weight's column, and
                        // of the rounded column, both at least
  int64_t* places;      // [rows] the first such column, or the first that is not a number
  float* values;        // [rows] what stands there
};

// Some rows of int8 products, of whole panels.
struct CbgenScores {
  const float* scores;  // [rows][panels * 32]
  int64_t rows;
  int64_t panels;
  int64_t columns;        // of them that exist
  const char* quantized;  // the rows' headers and values, row_bytes apart
  int64_t row_bytes;
  const float* errors;  // [panels][2][32], as in CbgenBestColumns
  float* bounds;        // [panels], bounds_stride apart, [rows]
  int64_t bounds_stride;
};

// Attention of the queries of a step to keys and values in pages; strides count elements.
struct CbgenAttention {
  const float* query;  // [tokens][heads][key_dim]
  int64_t query_token_stride;
  int64_t query_head_stride;
  const void* keys;  // [blocks][page_size][kv_heads][key_dim]
  const void* values;
  int64_t key_block_stride;
  int64_t key_token_stride;
  int64_t key_head_stride;
  int64_t value_block_stride;
  int64_t value_token_stride;
  int64_t value_head_stride;
  const int64_t* block_tables;  // [requests][block_table_stride]
  int64_t block_table_stride;
  const int64_t* query_starts;  // [requests + 1]
  const int64_t* key_lens;      // [requests]
  int64_t requests;
  int64_t heads;
  int64_t kv_heads;
  int64_t key_dim;
  int64_t value_dim;
  int64_t page_size;
  int64_t window;      // keys that a query sees, its own included; 0 = all
  int64_t chunk;       // keys from the last multiple of it on; 0 = all
  const float* sinks;  // [heads] or null
  float* output;       // [tokens][heads][value_dim]
  float scaling;
  float softcap;   // 0 = none
  int32_t format;  // CbgenFormat of keys and values
};

// One of the queries that attend to a segment together.
struct CbgenSharedQuery {
  int64_t token;   // among the step's
  float* partial;  // [heads][state] where its states over the segment go
};

// Some consecutive queries of one request under some key heads, over some of their keys; or the only
// queries of several requests over a segment that all of them see whole.
struct CbgenAttentionTask {
  int64_t request;
  int64_t first_head;  // key heads
  int64_t num_heads;
  int64_t first_token;  // among the step's tokens
  int64_t num_tokens;
  int64_t first_segment;
  int64_t num_segments;
  float* partial;  // [segments][rows][state] of an attention over some segments of several; or null
  int64_t segment_stride;          // floats from a segment to the next one in `partial`
  const CbgenSharedQuery* shared;  // [num_tokens], whose keys are those of `request`; or null
  int64_t cost;
};

// hidden[r] += addend[r], if there is one; output[r] = norm of hidden[r], if there is a weight.
struct CbgenNorm {
  float* hidden;  // [rows][size]
  int64_t size;
  const float* addend;  // [rows][size], rows addend_stride apart; or null
  int64_t addend_stride;
  const float* weight;  // [size] or null
  float* output;        // [rows][size], rows output_stride apart
  int64_t output_stride;
  float epsilon;
};

// Pages of one layer, float32; strides count elements.
struct CbgenCache {
  float* keys;  // [blocks][page_size][kv_heads][head_dim]
  float* values;
  int64_t key_block_stride;
  int64_t key_token_stride;
  int64_t key_head_stride;
  int64_t value_block_stride;
  int64_t value_token_stride;
  int64_t value_head_stride;
  int64_t page_size;
};

// The queries, keys and values of a step's tokens before they attend.
struct CbgenHeads {
  float* rows;  // [tokens][stride]: all heads of queries, of keys, of values at their offsets
  int64_t stride;
  int64_t query_offset;
  int64_t key_offset;
  int64_t value_offset;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t rotary_dim;  // 0 = not rotated
  const float* cos;    // [tokens][rotary_dim]
  const float* sin;
  const float* query_norm;  // [head_dim] or null
  const float* key_norm;
  const int64_t* slots;  // [tokens] block * page_size + place in the block
  CbgenCache cache;
  float epsilon;
};

// Gates and ups of some rows, [rows][columns], and where the products of activation and up go.
struct CbgenGates {
  const float* gates;
  const float* ups;
  int64_t stride;  // of both
  int64_t rows;
  int64_t columns;
  float* output;
  int64_t output_stride;
};

// Keys are attended in segments at fixed positions, whoever computes them, and the results of
// segments are merged in order: so the bits of an answer do not depend on how work was split.
constexpr int64_t CBGEN_SEGMENT = 256;
// Keys that are in registers and scratch together.
constexpr int64_t CBGEN_TILE = 64;
// Query rows (key heads x tokens x heads of a group) of a task; more heads in a group than this make
// one token under one key head a task.
constexpr int64_t CBGEN_ATTENTION_ROWS = 96;

// Products with int8 weights. Rows are quantized first, once for all columns.
struct CbgenInt8Kernels {
  int64_t (*row_bytes)(int64_t depth);  // of a quantized row
  int64_t (*scratch)(int64_t depth);    // floats a thread needs to quantize
  void (*quantize)(const CbgenLinear& linear, int64_t first_row, int64_t last_row, char* rows,
                   float* scratch);
  // As CbgenKernels.linear, of rows that `quantize` has written.
  void (*linear)(const CbgenLinear& linear, const char* rows, int64_t first_row, int64_t last_row,
                 int64_t first_panel, int64_t last_panel);
};

struct CbgenKernels {
  const char* name;
  // Compute the panels [first_panel, last_panel) for the rows [first_row, last_row).
  void (*linear)(const CbgenLinear& linear, int64_t first_row, int64_t last_row,
                 int64_t first_panel, int64_t last_panel);
  int64_t (*attention_scratch)(const CbgenAttention& attention);  // floats a thread needs
  // `next` is what this thread probably does next, whose first keys are fetched meanwhile, or null.
  void (*attend)(const CbgenAttention& attention, const CbgenAttentionTask& task,
                 const CbgenAttentionTask* next, float* scratch);
  // Merge the partial states of one split task's segments, in order, into the output.
  void (*merge)(const CbgenAttention& attention, const CbgenAttentionTask& task, float* scratch);
  void (*norm)(const CbgenNorm& norm, int64_t first_row, int64_t last_row);
  void (*place_heads)(const CbgenHeads& heads, int64_t first_token, int64_t last_token);
  void (*activate)(const CbgenGates& gates);
  const CbgenInt8Kernels* int8;
  // Multiplies and adds in registers alone, so many rounds; returns the operations of a round.
  int64_t (*multiply_add)(int64_t rounds, float* result);
  // The first place of the largest number of a row, or of what is not a number; size > 0.
  int64_t (*largest)(const float* row, int64_t size);
  // What no exact product of a row with a panel exceeds: infinity where a row is too large to tell.
  void (*bound_scores)(const CbgenScores& scores);
};

extern const CbgenKernels cbgen_portable;
#if defined(__x86_64__)
extern const CbgenKernels cbgen_avx2;
extern const CbgenKernels cbgen_avx512;
extern const CbgenKernels cbgen_avx512vnni;
extern const CbgenInt8Kernels cbgen_int8_avx512vnni;
#endif
