#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "memscale/core/plan/plan.h"
#include "plan_samples.h"

namespace memscale {
namespace {

std::string error_of(const std::string& text) {
  return plan_error_of([&] { plan_from_json(text); });
}

// Replaces the first occurrence; it must be there.
std::string replaced(std::string text, std::string_view from,
                     std::string_view to) {
  const auto at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

TEST(PlanJson, IsOneStableLine) {
  EXPECT_EQ(
      to_json(small_plan()),
      R"({"format":"memscale-plan","version":2,"model":"Net",)"
      R"("fingerprint":"00ff00ff00ff00ff","call":"x=float32[4, 8]",)"
      R"("device":"sim","optimizer":"adamw","mode":"aggressive",)"
      R"("budget":6291456,"verdicts":[)"
      R"({"rule":"weigh_memory","text":"little"},)"
      R"({"rule":"recompute_layers","text":"some"}],"choices":[)"
      R"({"technique":"optimizer_state","choice":"8bit","keep_set":null,)"
      R"("bytes":3072,"nanoseconds":1,"reason":"smaller"}],"layers":[)"
      R"({"layer":"","choices":[],)"
      R"("parameter_bytes":null,"plain_bytes":1024,"held_bytes":1024},)"
      R"({"layer":"a","choices":[{"technique":"recompute","choice":"cheap",)"
      R"("keep_set":null,"bytes":3145728,"nanoseconds":1499,)"
      R"("reason":"frees 3.00 MiB"}],)"
      R"("parameter_bytes":null,"plain_bytes":4194304,"held_bytes":1048576},)"
      R"({"layer":"b.0","choices":[{"technique":"recompute",)"
      R"("choice":"chosen","keep_set":{)"
      R"("ops":["aten::mm","aten::tanh"],"kept":[[0,0],[1,2]]},)"
      R"("bytes":3145728,"nanoseconds":2500,"reason":"frees 3.00 MiB"}],)"
      R"("parameter_bytes":262144,"plain_bytes":4194304,"held_bytes":1048576}],)"
      R"("plain_peak":10485760,"peak":5242880,)"
      R"("host_peak":7,"plain_nanoseconds":40000,"nanoseconds":3999})");
}

TEST(PlanJson, ReadsBackWhatItWrote) {
  Plan plan = small_plan();
  EXPECT_EQ(plan_from_json(to_json(plan)), plan);
  plan.budget.reset();
  plan.verdicts.clear();
  plan.model = "quote \" slash \\ line \n \xc3\xa9 \xf0\x9f\x8d\x8c";
  EXPECT_EQ(plan_from_json(to_json(plan)), plan);
  EXPECT_EQ(to_json(plan_from_json(to_json(plan))), to_json(plan));
}

Plan any_plan() {
  const auto text = [] {
    return *rc::gen::container<std::string>(
        rc::gen::inRange<char>(1, 127));  // UTF-8 is checked above
  };
  const auto number = [] {
    return *rc::gen::oneOf(
        rc::gen::inRange<std::int64_t>(0, 1'000),
        rc::gen::map(rc::gen::arbitrary<std::int64_t>(),
                     [](std::int64_t n) { return n < 0 ? -(n + 1) : n; }));
  };
  Plan plan;
  for (std::string* field : {&plan.model, &plan.fingerprint, &plan.call,
                             &plan.device, &plan.optimizer}) {
    *field = text();
  }
  plan.mode = *rc::gen::element(OptimizationMode::Conservative,
                                OptimizationMode::Balanced,
                                OptimizationMode::Aggressive);
  if (*rc::gen::arbitrary<bool>()) plan.budget = Bytes(number() / 2 + 1);
  for (int i = *rc::gen::inRange(0, 3); i > 0; --i) {
    plan.verdicts.push_back({text(), text()});
  }
  const auto any_choice = [&](std::string_view technique,
                              std::vector<std::string> words) {
    Choice choice = made_choice(technique, *rc::gen::elementOf(words));
    choice.bytes = Bytes(number());
    choice.nanoseconds = number();
    choice.reason = text();
    return choice;
  };
  if (*rc::gen::arbitrary<bool>()) {
    plan.choices.push_back(any_choice("use_cache", {"forget"}));
  }
  if (*rc::gen::arbitrary<bool>()) {
    plan.choices.push_back(any_choice("optimizer_state", {"8bit"}));
  }
  const int num_layers = *rc::gen::inRange(1, 5);
  for (int i = 0; i < num_layers; ++i) {
    LayerPlan layer;
    layer.layer = str(text(), i);
    layer.plain_bytes = Bytes(number());
    layer.held_bytes = Bytes(number());
    if (*rc::gen::arbitrary<bool>()) layer.parameter_bytes = Bytes(number());
    if (*rc::gen::arbitrary<bool>()) {
      layer.choices = {any_choice("recompute", {"cheap", "block"})};
    } else if (*rc::gen::arbitrary<bool>()) {
      layer.choices = {any_choice("recompute", {"chosen"})};
      KeepSet set;
      set.ops = *rc::gen::container<std::vector<std::string>>(
          rc::gen::element<std::string>("aten::mm", "aten::add_.Tensor", ""));
      for (std::size_t op = 0; op < set.ops.size(); ++op) {
        if (*rc::gen::arbitrary<bool>()) set.kept.emplace_back(op, op % 3);
      }
      layer.choices[0].keep_set = std::move(set);
    }
    plan.layers.push_back(std::move(layer));
  }
  plan.plain_peak = Bytes(number());
  plan.peak = Bytes(number());
  plan.host_peak = Bytes(number());
  plan.plain_nanoseconds = number();
  plan.nanoseconds = number();
  return plan;
}

TEST(PlanJsonProperty, ThereAndBackIsTheSame) {
  RC_ASSERT(rc::check([] {
    const Plan plan = any_plan();
    const std::string text = to_json(plan);
    const Plan again = plan_from_json(text);
    RC_ASSERT(again == plan);
    RC_ASSERT(to_json(again) == text);
    RC_ASSERT(again.diff(plan).empty());
    RC_ASSERT(again.explain() == plan.explain());
  }));
}

// Every field, by its place and its text in the JSON of small_plan().
struct Field {
  std::string_view place, text, wrong, rule;
};
constexpr std::string_view kText = "a text";
constexpr std::string_view kInteger = "an integer of 64 bits";
const Field kFields[] = {
    {"model", R"("model":"Net")", "1", kText},
    {"fingerprint", R"("fingerprint":"00ff00ff00ff00ff")", "null", kText},
    {"call", R"("call":"x=float32[4, 8]")", "[]", kText},
    {"device", R"("device":"sim")", "true", kText},
    {"optimizer", R"("optimizer":"adamw")", "{}", kText},
    {"mode", R"("mode":"aggressive")", R"("quick")",
     "one of conservative, balanced, aggressive"},
    {"budget", R"("budget":6291456)", R"("6MiB")", kInteger},
    {"verdicts[0].rule", R"("rule":"weigh_memory")", "0", kText},
    {"verdicts[0].text", R"("text":"little")", "false", kText},
    {"layers[1].layer", R"("layer":"a")", "0", kText},
    {"choices[0].technique", R"("technique":"optimizer_state")", "8", kText},
    {"choices[0].choice", R"("choice":"8bit")", "8", kText},
    {"choices[0].bytes", R"("bytes":3072)", R"("3KiB")", kInteger},
    {"layers[0].choices", R"("choices":[])", "{}", "an array"},
    {"choices[0].keep_set", R"("keep_set":null)", "[]", "an object"},
    {"layers[2].choices[0].keep_set.ops", R"("ops":["aten::mm","aten::tanh"])",
     R"("aten::mm")", "an array"},
    {"layers[2].choices[0].keep_set.kept", R"("kept":[[0,0],[1,2]])", "{}",
     "an array"},
    {"layers[0].parameter_bytes", R"("parameter_bytes":null)", "true",
     kInteger},
    {"layers[1].plain_bytes", R"("plain_bytes":4194304)", "4194304.0",
     kInteger},
    {"layers[0].held_bytes", R"("held_bytes":1024)", "1e3", kInteger},
    {"layers[1].choices[0].nanoseconds", R"("nanoseconds":1499)", "null",
     kInteger},
    {"layers[1].choices[0].reason", R"("reason":"frees 3.00 MiB")", "3", kText},
    {"plain_peak", R"("plain_peak":10485760)", "9223372036854775808", kInteger},
    {"peak", R"("peak":5242880)", "-9223372036854775809", kInteger},
    {"host_peak", R"("host_peak":7)", R"("7")", kInteger},
    {"plain_nanoseconds", R"("plain_nanoseconds":40000)", "true", kInteger},
    {"nanoseconds", R"("nanoseconds":3999)", "[3999]", kInteger},
};

std::string_view key_of(const Field& field) {
  return field.text.substr(0, field.text.find(':'));
}

TEST(PlanJson, EachFieldMustBeThere) {
  const std::string text = to_json(small_plan());
  for (const Field& field : kFields) {
    // With the comma after it, or before the last.
    std::string with_comma = std::string(field.text) + ",";
    if (text.find(with_comma) == text.npos) with_comma = "," + with_comma;
    if (with_comma.front() == ',') with_comma.pop_back();
    EXPECT_EQ(error_of(replaced(text, with_comma, "")),
              str(field.place, " is missing"));
  }
}

TEST(PlanJson, EachFieldHasItsType) {
  const std::string text = to_json(small_plan());
  for (const Field& field : kFields) {
    const std::string error = error_of(
        replaced(text, field.text, str(key_of(field), ":", field.wrong)));
    const std::string expected =
        str(field.place, " must be ", field.rule, ", got ");
    EXPECT_EQ(error.substr(0, expected.size()), expected);
  }
}

TEST(PlanJson, EachFieldIsThereOnce) {
  const std::string text = to_json(small_plan());
  for (const Field& field : kFields) {
    const std::string_view key = key_of(field);
    const std::string name(key.substr(1, key.size() - 2));
    EXPECT_EQ(
        error_of(replaced(text, field.text, str(field.text, ",", field.text))),
        str("a plan must not name a field twice, got '", name, "'"));
  }
}

TEST(PlanJson, NoFieldIsUnknown) {
  const std::string text = to_json(small_plan());
  struct Case {
    std::string_view before, error;
  };
  const Case cases[] = {
      {R"("model")", "a plan has no field 'colour'"},
      {R"("rule":"rec)", "verdicts[1] has no field 'colour'"},
      {R"("layer":"a")", "layers[1] has no field 'colour'"},
      {R"("technique":"opt)", "choices[0] has no field 'colour'"},
      {R"("ops")", "layers[2].choices[0].keep_set has no field 'colour'"},
  };
  for (const Case& one : cases) {
    EXPECT_EQ(
        error_of(replaced(text, one.before, str(R"("colour":1,)", one.before))),
        one.error);
  }
}

TEST(PlanJson, RefusesAnEditedPlanNamingThePlace) {
  struct Case {
    std::string_view from, to, error;
  };
  const Case cases[] = {
      {"memscale-plan", "memscale-trace",
       "format must be 'memscale-plan', got 'memscale-trace'"},
      {R"("version":2)", R"("version":3)", "version must be 1 or 2, got 3"},
      {R"("version":2)", R"("version":0)", "version must be 1 or 2, got 0"},
      {R"("version":2)", R"("version":-1)", "version must be 1 or 2, got -1"},
      {R"("version":2)", R"("version":"2")", "version must be 1 or 2, got '2'"},
      {R"("version":2)", R"("version":99999999999999999999)",
       "version must be 1 or 2, got 1e+20"},
      {R"("version":2,)", "", "version must be 1 or 2, got null"},
      {R"("version":2)", R"("version":1)", "layers[0].policy is missing"},
      {"8bit", "4bit", "choices[0].choice must be one of 8bit, got '4bit'"},
      {R"("budget":6291456)", R"("budget":0)", "budget must be > 0, got 0"},
      {R"("peak":5242880)", R"("peak":-1)", "peak must be >= 0, got -1"},
      {R"("held_bytes":1024)", R"("held_bytes":-1)",
       "layers[0].held_bytes must be >= 0, got -1"},
      {R"("layer":"a")", R"("layer":"")",
       "layers[1].layer must not be there twice, got ''"},
      {R"([[0,0],[1,2]])", R"([[1,2],[0,0]])",
       "layers[2].choices[0].keep_set.kept must be sorted without repetition, "
       "kept[1] is not after kept[0]"},
      {R"([[0,0],[1,2]])", R"([[0,0],[0,0]])",
       "layers[2].choices[0].keep_set.kept must be sorted without repetition, "
       "kept[1] is not after kept[0]"},
      {R"([[0,0],[1,2]])", R"([[0,0],[2,0]])",
       "layers[2].choices[0].keep_set.kept[1] must name one of 2 ops, got 2"},
      {R"([[0,0],[1,2]])", R"([[0,0],[1]])",
       "layers[2].choices[0].keep_set.kept[1] must be a pair, got an array"},
      {R"([[0,0],[1,2]])", R"([[0,0],[1,-2]])",
       "layers[2].choices[0].keep_set.kept[1][1] must be an integer from 0 to "
       "2^32 - 1, "
       "got -2"},
      {R"([[0,0],[1,2]])", R"([[0,0],[4294967296,2]])",
       "layers[2].choices[0].keep_set.kept[1][0] must be an integer from 0 to "
       "2^32 - 1, "
       "got 4294967296"},
      {R"("aten::tanh")", "3",
       "layers[2].choices[0].keep_set.ops[1] must be a text"},
      {R"({"rule":"weigh_memory","text":"little"})", "null",
       "verdicts[0] must be an object, got null"},
  };
  const std::string text = to_json(small_plan());
  for (const Case& one : cases) {
    const std::string error = error_of(replaced(text, one.from, one.to));
    EXPECT_EQ(error.substr(0, one.error.size()), one.error) << one.to;
  }
}

TEST(PlanJson, APlanHasLayers) {
  std::string text = to_json(small_plan());
  const auto begin = text.find(R"("layers":[)") + 10;
  const auto end = text.find(R"(],"plain_peak")");
  text.erase(begin, end - begin);
  EXPECT_EQ(error_of(text), "layers must not be empty");
}

TEST(PlanJson, NoPrefixOfAPlanIsAPlan) {
  const std::string text = to_json(small_plan());
  for (std::size_t size = 0; size < text.size(); ++size) {
    EXPECT_NE(error_of(text.substr(0, size)), "no error") << size;
  }
  EXPECT_EQ(error_of(text + " \n"), "no error");
  EXPECT_TRUE(error_of(text + "x").starts_with("a plan must be JSON, got"));
}

TEST(PlanJson, RefusesDeepNestingUnread) {
  const std::string_view expected =
      "a plan must not nest deeper than 10 levels";
  // That it is no JSON further on is not said: nobody looked.
  EXPECT_EQ(error_of(std::string(30'000'000, '[')), expected);
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += R"({"a":)";
  EXPECT_EQ(error_of(objects), expected);
  EXPECT_EQ(error_of(replaced(to_json(small_plan()), R"("ops":[)",
                              R"("ops":[[[[[[[[[[)")),
            expected);
}

TEST(PlanJson, LongTextsAreReadAndNotQuoted) {
  const std::string text(100'000, 'x');
  EXPECT_EQ(error_of(str('"', text, '"')),
            str("a plan must be an object, got '", text.substr(0, 60), "'..."));
  EXPECT_EQ(error_of(str("{\"", text, "\":1}")),
            "format must be 'memscale-plan', got null");
  EXPECT_LT(error_of(str('"', text)).size(), 100u);
  const std::string plan = replaced(to_json(small_plan()), R"("model":"Net")",
                                    str(R"("model":")", text, '"'));
  EXPECT_EQ(plan_from_json(plan).model, text);
}

TEST(PlanJson, RefusesWhatIsLongerThanAnyPlanUnread) {
  const std::string_view expected =
      "a plan must not be longer than 32.00 MiB, got 95.37 MiB";
  EXPECT_EQ(error_of(std::string(100'000'000, '[')), expected);
  EXPECT_EQ(error_of('"' + std::string(99'999'998, 'x') + '"'), expected);
  const std::string space(33'554'432 - to_json(small_plan()).size(), ' ');
  EXPECT_EQ(error_of(to_json(small_plan()) + space + " ").substr(0, 40),
            expected.substr(0, 40));
}

TEST(PlanJson, CannotWriteWhatIsNotUtf8) {
  Plan plan = small_plan();
  plan.layers[1].choices[0].reason = "\xe9";
  EXPECT_EQ(plan_error_of([&] { to_json(plan); }),
            "layers[1].choices[0].reason must be UTF-8 to be written");
}

}  // namespace
}  // namespace memscale
