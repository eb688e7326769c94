# A thin front of meson. Everything that does work is in scripts/ and works without make too.
BUILD = build
PROMPT = docs/example-prompt.txt

.PHONY: all setup run test asan tsan fuzz bench lint clean

all: $(BUILD)/build.ninja
	@ninja -C $(BUILD)

$(BUILD)/build.ninja: | setup
	meson setup $(BUILD)

setup: # installs what is missing, does nothing otherwise
	@scripts/setup build

run: all # one prompt, answered by two processes
	$(BUILD)/baton run -m models/gemma3-tiny --prompt-file $(PROMPT) --mode stream -n 64

test: setup
	@scripts/test

asan: setup
	@scripts/test -s asan

tsan: setup
	@scripts/test -s tsan

fuzz: setup # FUZZ_SECONDS over all targets together
	@scripts/setup fuzz && scripts/fuzz $(or $(FUZZ_SECONDS),60)

bench: all
	@bench/run $(BUILD)

lint: all
	@scripts/setup lint && scripts/lint $(BUILD)

clean:
	rm -rf $(BUILD) $(BUILD)-asan $(BUILD)-tsan $(BUILD)-fuzz
