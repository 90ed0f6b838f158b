#include "memscale/core/trace/trace.h"

#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "memscale/base/error.h"
#include "memscale/core/trace/trace_json.h"

namespace memscale {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

// y = dropout(x @ w) and its backward: two layers, three ops, every kind of id.
Trace small_trace() {
  Trace trace;
  trace.layers = {{.name = "fc"}, {.name = "drop"}};
  trace.storages = {
      {.bytes = 24_B, .category = Category::Parameter, .layer = LayerId(0)},
      {.bytes = 16_B,
       .count = 3,
       .category = Category::Activation,
       .layer = LayerId(0),
       .born = OpId(0),
       .freed = OpId(2)},
      {.bytes = 8_B, .place = Place::Host, .category = Category::Input},
  };
  trace.values = {
      {.storage = StorageId(0),
       .dtype = Dtype::Float32,
       .sizes = {2, 3},
       .strides = {3, 1}},
      {.storage = StorageId(1),
       .dtype = Dtype::Float32,
       .sizes = {2, 2},
       .strides = {2, 1},
       .offset = 1,
       .version = 4},
      {.storage = {}, .dtype = Dtype::Int64, .sizes = {3}, .strides = {}},
  };
  trace.ops.resize(3);
  Op& mm = trace.ops[0];
  mm.name = "aten::mm";
  mm.layer = LayerId(0);
  mm.inputs = {ValueId(0), ValueId(2)};
  mm.outputs = {ValueId(1)};
  mm.uses = {{.access = Access::Update, .is_leaf = true}, {}};
  mm.accumulates = mm.transposed = mm.not_waited_for = mm.aliases = true;
  mm.flops = 24;
  mm.moved = 40_B;
  mm.workspace = 512_B;
  mm.workspace_known = true;
  Op& dropout = trace.ops[1];
  dropout.name = "aten::native_dropout";
  dropout.layer = LayerId(1);
  dropout.inputs = {ValueId(1)};
  dropout.random = true;
  Op& backward = trace.ops[2];
  backward.name = "aten::mm";
  backward.phase = Phase::Backward;
  backward.forward = OpId(0);
  backward.mutates = backward.view = backward.opaque = true;
  backward.in_function = true;
  trace.events = {
      {.kind = Event::Kind::EnterLayer, .layer = LayerId(0), .no_grad = true},
      {.kind = Event::Kind::EnterFunction, .op = 1, .values = {ValueId(1)}},
      {.kind = Event::Kind::LeaveFunction, .op = 3, .values = {ValueId(1)}},
      {.kind = Event::Kind::LeaveLayer, .op = 3, .layer = LayerId(0)}};
  trace.saves = {{.op = OpId(0), .value = ValueId(0), .released = OpId(2)},
                 {.op = OpId(1), .value = ValueId(1)}};
  trace.saves_known = false;
  trace.notes = {"a \"note\"\n", "\xc3\xa9"};
  return trace;
}

// The error's text, or "no error".
std::string error_of(const std::function<void()>& call) {
  try {
    call();
    return "no error";
  } catch (const TraceError& error) {
    return error.what();
  }
}

TEST(Value, NumelIsTheProduct) {
  const auto numel = [](std::vector<std::int64_t> sizes) {
    Value value;
    value.sizes = std::move(sizes);
    return value.numel();
  };
  EXPECT_EQ(numel({}), 1);
  EXPECT_EQ(numel({2, 3, 5}), 30);
  EXPECT_EQ(numel({2, 0, 5}), 0);
  EXPECT_EQ(numel({kMax}), kMax);
  EXPECT_EQ(numel({kMax, kMax, 0}), 0);
  EXPECT_THROW(numel({kMax, 2}), TraceError);
}

TEST(TraceCheck, AcceptsASoundTrace) {
  EXPECT_NO_THROW(Trace().check());
  EXPECT_NO_THROW(small_trace().check());
}

TEST(TraceCheck, NamesTheFirstFault) {
  struct Case {
    void (*spoil)(Trace&);
    std::string_view error;
  };
  const Case cases[] = {
      {[](Trace& t) { t.ops[1].layer = LayerId(2); },
       "ops[1].layer must point into layers, which has 2, got 2"},
      {[](Trace& t) { t.ops[2].forward = OpId(3); },
       "ops[2].forward must point into ops, which has 3, got 3"},
      {[](Trace& t) { t.ops[2].forward = OpId(2); },
       "ops[2].forward must come before the op itself, got 2"},
      {[](Trace& t) { t.ops[0].inputs[1] = ValueId(3); },
       "ops[0].inputs[1] must point into values, which has 3, got 3"},
      {[](Trace& t) { t.ops[0].inputs[1] = ValueId(); },
       "ops[0].inputs[1] must point into values, got no id"},
      {[](Trace& t) { t.ops[0].outputs[0] = ValueId(9); },
       "ops[0].outputs[0] must point into values, which has 3, got 9"},
      {[](Trace& t) { t.ops[0].uses.pop_back(); },
       "ops[0].uses must be as many as the inputs, 2, or none, got 1"},
      {[](Trace& t) { t.events[2].op = 0; },
       "events[2].op must be from 1 to 3, got 0"},
      {[](Trace& t) { t.events[3].op = 4; },
       "events[3].op must be from 3 to 3, got 4"},
      {[](Trace& t) { t.events[0].layer = LayerId(); },
       "events[0].layer must point into layers, got no id"},
      {[](Trace& t) { t.events[1].values[0] = ValueId(3); },
       "events[1].values[0] must point into values, which has 3, got 3"},
      {[](Trace& t) { t.ops[0].flops = -1; },
       "ops[0].flops must be >= 0, got -1"},
      {[](Trace& t) { t.ops[0].moved = Bytes(-2); },
       "ops[0].moved must be >= 0, got -2"},
      {[](Trace& t) { t.ops[0].workspace = Bytes(-3); },
       "ops[0].workspace must be >= 0, got -3"},
      {[](Trace& t) { t.ops[0].workspace_known = false; },
       "ops[0].workspace must be 0 where it is not known, got 512"},
      {[](Trace& t) { t.values[1].storage = StorageId(3); },
       "values[1].storage must point into storages, which has 3, got 3"},
      {[](Trace& t) { t.values[0].sizes[1] = -3; },
       "values[0].sizes[1] must be >= 0, got -3"},
      {[](Trace& t) { t.values[0].strides[0] = -1; },
       "values[0].strides[0] must be >= 0, got -1"},
      {[](Trace& t) { t.values[0].strides.pop_back(); },
       "values[0].strides must be as many as the sizes, 2, or none, got 1"},
      {[](Trace& t) { t.values[1].offset = -4; },
       "values[1].offset must be >= 0, got -4"},
      {[](Trace& t) { t.values[0].sizes = {kMax, 2}; },
       "values[0].sizes must multiply to less than 2^63"},
      {[](Trace& t) { t.storages[2].bytes = Bytes(-8); },
       "storages[2].bytes must be >= 0, got -8"},
      {[](Trace& t) { t.storages[2].count = 0; },
       "storages[2].count must be >= 1, got 0"},
      {[](Trace& t) { t.storages[2].count = 2147483646; },
       "storages[2].count must keep the sum of all counts within 2147483648, "
       "got 2147483646"},
      {[](Trace& t) { t.storages[1].bytes = Bytes(kMax / 4); },
       "storages[1].bytes must keep the sum of all storages within "
       "4611686018427387903, got 2305843009213693951"},
      {[](Trace& t) { t.storages[0].layer = LayerId(7); },
       "storages[0].layer must point into layers, which has 2, got 7"},
      {[](Trace& t) { t.storages[1].born = OpId(3); },
       "storages[1].born must point into ops, which has 3, got 3"},
      {[](Trace& t) { t.storages[1].freed = OpId(3); },
       "storages[1].freed must point into ops, which has 3, got 3"},
      {[](Trace& t) {
         t.storages[1].born = OpId(2);
         t.storages[1].freed = OpId(1);
       },
       "storages[1].freed must not come before born, op 2, got 1"},
      {[](Trace& t) { t.saves[0].op = OpId(3); },
       "saves[0].op must point into ops, which has 3, got 3"},
      {[](Trace& t) { t.saves[0].value = ValueId(3); },
       "saves[0].value must point into values, which has 3, got 3"},
      {[](Trace& t) { t.saves[1].released = OpId(3); },
       "saves[1].released must point into ops, which has 3, got 3"},
      {[](Trace& t) { t.saves[1].released = OpId(0); },
       "saves[1].released must not come before the op that saves, 1, got 0"},
      {[](Trace& t) { t.storages[1].bytes = Bytes(kMax); },
       "storages[1].bytes must keep the sum of all storages within "
       "4611686018427387903, got 9223372036854775807"},
      {[](Trace& t) { t.ops[0].workspace = Bytes(kMax / 2 - 79); },
       "ops[0].workspace must stay, with all storages, within "
       "4611686018427387903, got 4611686018427387824"},
  };
  for (const Case& one : cases) {
    Trace trace = small_trace();
    one.spoil(trace);
    EXPECT_EQ(error_of([&] { trace.check(); }), one.error);
  }
}

TEST(TraceCheck, ALifetimeMayBeOneOp) {
  Trace trace = small_trace();
  trace.storages[1].freed = OpId(0);
  trace.saves[0].released = OpId(0);
  EXPECT_NO_THROW(trace.check());
}

TEST(TraceJson, IsOneStableLine) {
  Trace trace;
  trace.layers = {{.name = "fc"}};
  trace.ops.resize(1);
  trace.ops[0].name = "aten::t";
  trace.ops[0].layer = LayerId(0);
  trace.ops[0].view = true;
  trace.ops[0].inputs = {ValueId(0)};
  trace.ops[0].uses = {{.access = Access::Update, .is_leaf = true}};
  trace.events = {
      {.kind = Event::Kind::EnterFunction, .op = 1, .values = {ValueId(0)}}};
  trace.saves = {{.op = OpId(0), .value = ValueId(0)}};
  trace.values = {{.storage = StorageId(0),
                   .dtype = Dtype::Float32,
                   .sizes = {2, 3},
                   .strides = {1, 2}}};
  trace.storages = {{.bytes = 24_B, .category = Category::OptimizerState}};
  EXPECT_EQ(
      to_json(trace),
      R"({"format":"memscale-trace","version":3,)"
      R"("layers":[{"name":"fc"}],)"
      R"("ops":[{"name":"aten::t","phase":"forward","layer":0,"forward":null,)"
      R"("inputs":[0],"outputs":[],)"
      R"("uses":[{"access":"update","is_leaf":true}],)"
      R"("random":false,"mutates":false,)"
      R"("view":true,"opaque":false,"in_function":false,)"
      R"("may_write":false,"no_grad":false,"aliases":false,)"
      R"("accumulates":false,"transposed":false,"not_waited_for":false,)"
      R"("flops":0,"moved":0,"workspace":0,)"
      R"("workspace_known":false,"nanoseconds":0}],)"
      R"("events":[{"kind":"enter_function","op":1,"layer":null,)"
      R"("no_grad":false,"values":[0]}],)"
      R"("values":[{"storage":0,"dtype":"float32","sizes":[2,3],)"
      R"("strides":[1,2],"offset":0,"version":0}],)"
      R"("storages":[{"bytes":24,"count":1,"place":"device",)"
      R"("category":"optimizer_state","layer":null,"born":null,)"
      R"("freed":null,"let_go":null,"returned":false,)"
      R"("plain_freed":null}],)"
      R"("saves":[{"op":0,"value":0,"released":null,)"
      R"("by_function":false}],)"
      R"("saves_known":true,"notes":[]})");
}

TEST(TraceJson, ReadsBackWhatItWrote) {
  EXPECT_EQ(trace_from_json(to_json(Trace())), Trace());
  const Trace trace = small_trace();
  EXPECT_EQ(trace_from_json(to_json(trace)), trace);
  EXPECT_EQ(to_json(trace_from_json(to_json(trace))), to_json(trace));
}

TEST(TraceJson, OrderOfFieldsDoesNotMatterWhenRead) {
  EXPECT_EQ(trace_from_json(R"( {"notes":[], "saves_known":true, "saves":[],
      "storages":[], "values":[], "events":[], "ops":[], "layers":[],
      "version":3, "format":"memscale-trace"} )"),
            Trace());
}

TEST(TraceJson, CannotWriteWhatIsNotUtf8) {
  Trace trace = small_trace();
  trace.notes[1] = "\xe9";
  EXPECT_EQ(error_of([&] { to_json(trace); }),
            "notes[1] must be UTF-8 to be written");
  trace = small_trace();
  trace.ops[2].name = "\xff";
  EXPECT_EQ(error_of([&] { to_json(trace); }),
            "ops[2].name must be UTF-8 to be written");
}

// Replaces the first occurrence; it must be there.
std::string replaced(std::string text, std::string_view from,
                     std::string_view to) {
  const auto at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

TEST(TraceJson, RefusesAnEditedTraceNamingThePlace) {
  struct Case {
    std::string_view from, to, error;
  };
  const Case cases[] = {
      {"memscale-trace", "memscale-plan",
       "format must be 'memscale-trace', got 'memscale-plan'"},
      {R"("format":"memscale-trace",)", "",
       "format must be 'memscale-trace', got null"},
      {R"("version":3)", R"("version":2)", "version must be 3, got 2"},
      {R"("version":3,)", "", "version must be 3, got null"},
      {R"("version":3)", R"("version":"3")", "version must be 3, got '3'"},
      {R"("backward")", R"("sideways")",
       "ops[2].phase must be one of forward, backward, optimizer, got "
       "'sideways'"},
      {R"("backward")", "1", "ops[2].phase must be one of"},
      {R"("host")", R"("moon")",
       "storages[2].place must be one of device, host, got 'moon'"},
      {R"("activations")", R"("")", "storages[1].category must be one of"},
      {R"("layer":1)", R"("layer":-1)",
       "ops[1].layer must be null or an integer from 0 to 2^32 - 2, got -1"},
      {R"("layer":1)", R"("layer":4294967295)", "ops[1].layer must be null or"},
      {R"("layer":1)", R"("layer":1.0)", "ops[1].layer must be null or"},
      {R"("layer":1)", R"("layer":7)",
       "ops[1].layer must point into layers, which has 2, got 7"},
      {R"("layer":1,)", "", "ops[1].layer is missing"},
      {R"("inputs":[0,2])", R"("inputs":[0,"2"])",
       "ops[0].inputs[1] must be null or"},
      {R"("inputs":[0,2])", R"("inputs":{"0":2})",
       "ops[0].inputs must be an array, got an object"},
      {R"("inputs":[0,2])", R"("inputs":[0,null])",
       "ops[0].inputs[1] must point into values, got no id"},
      {R"("flops":24)", R"("flops":2.5)",
       "ops[0].flops must be an integer of 64 bits, got 2.5"},
      {R"("flops":24)", R"("flops":9223372036854775808)",
       "ops[0].flops must be an integer of 64 bits, got 9223372036854775808"},
      {R"("flops":24)", R"("flops":-1)", "ops[0].flops must be >= 0, got -1"},
      {R"("random":true)", R"("random":1)",
       "ops[1].random must be true or false, got 1"},
      {R"("version":4)", R"("version":4294967296)",
       "values[1].version must be an integer from 0 to 2^32 - 1, got "
       "4294967296"},
      {R"("version":4)", R"("version":-4)", "values[1].version must be an"},
      {R"("sizes":[2,3])", R"("sizes":[2,[3]])",
       "values[0].sizes[1] must be an integer of 64 bits, got an array"},
      {R"("dtype":"int64")", R"("dtype":null)",
       "values[2].dtype must be one of float32, float64, "},
      {R"("dtype":"int64")", R"("dtype":"torch.int64")",
       "values[2].dtype must be one of float32, float64, "},
      {R"("bytes":24)", R"("bytes":-24)",
       "storages[0].bytes must be >= 0, got -24"},
      {R"({"name":"fc"})", "null", "layers[0] must be an object, got null"},
      {R"("name":"fc")", R"("name":"fc","colour":1)",
       "layers[0] has no field 'colour'"},
      {R"("saves_known")", R"("extra":0,"saves_known")",
       "a trace has no field 'extra'"},
      {R"("name":"fc")", R"("name":"fc","name":"d")",
       "a trace must not name a field twice, got 'name'"},
      {R"("notes":[)", R"("notes":[[[[[[[[)",
       "a trace must not nest deeper than 8 levels"},
  };
  const std::string text = to_json(small_trace());
  for (const Case& one : cases) {
    const std::string edited = replaced(text, one.from, one.to);
    const std::string error = error_of([&] { trace_from_json(edited); });
    EXPECT_EQ(error.substr(0, one.error.size()), one.error) << one.to;
  }
}

TEST(TraceJson, RefusesWhatIsNoTrace) {
  struct Case {
    std::string_view text, error;
  };
  const Case cases[] = {
      {"", "a trace must be JSON, got an error at byte 1"},
      {"{", "a trace must be JSON, got an error at byte 2"},
      {"{} {}", "a trace must be JSON, got an error at byte 4"},
      {"\"\xff\"", "a trace must be JSON, got an error at byte 2"},
      {"[1, 1e999]", "a trace must be JSON, got an error at byte"},
      {"[]", "a trace must be an object, got an array"},
      {"null", "a trace must be an object, got null"},
  };
  for (const Case& one : cases) {
    const std::string error = error_of([&] { trace_from_json(one.text); });
    EXPECT_EQ(error.substr(0, one.error.size()), one.error) << one.text;
  }
}

TEST(TraceJson, NoPrefixOfATraceIsATrace) {
  const std::string text = to_json(small_trace());
  for (std::size_t size = 0; size < text.size(); ++size) {
    EXPECT_THROW(trace_from_json(text.substr(0, size)), TraceError) << size;
  }
}

TEST(TraceJson, ErrorsStayShortAndWhole) {
  // The 60th byte falls inside of a character, which must not be cut.
  std::string name = "x";
  for (int i = 0; i < 1'000'000; ++i) name += "\xc3\xa9";
  const std::string text = replaced(to_json(small_trace()), "backward", name);
  const std::string error = error_of([&] { trace_from_json(text); });
  EXPECT_LT(error.size(), 200u);
  EXPECT_TRUE(error.ends_with("\xc3\xa9'...")) << error;
}

TEST(TraceJson, RefusesDeepNestingAtOnce) {
  // The rest is not even JSON: that nobody says so shows it was not read.
  const std::string_view expected =
      "a trace must not nest deeper than 8 levels";
  EXPECT_EQ(error_of([] { trace_from_json("[[[[[[[[[ rest"); }), expected);
  EXPECT_EQ(error_of([] { trace_from_json(std::string(100'000'000, '[')); }),
            expected);
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  EXPECT_EQ(error_of([&] { trace_from_json(objects); }), expected);
}

}  // namespace
}  // namespace memscale
