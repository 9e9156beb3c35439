package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestTargetsAreRunAndJudged: the table distinguishes failed and passed targets, counts them, and has the path of the
// failing input.
func TestTargetsAreRunAndJudged(t *testing.T) {
	tree := t.TempDir()
	folder := filepath.Join(tree, "internal", "x")
	if err := os.MkdirAll(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	// "FUNC" stands for func, so that other tools do not find these targets in this tree.
	for name, text := range map[string]string{
		"go.mod": "module x\n",
		"internal/x/x_test.go": `package x
import "testing"
FUNC FuzzClean(f *testing.F) { f.Add(1); f.Fuzz(func(t *testing.T, n int) {}) }
FUNC FuzzFinds(f *testing.F) { f.Add(1); f.Fuzz(func(t *testing.T, n int) { if n != 1 { t.Fatal("found") } }) }
FUNC FuzzSeed(f *testing.F) { f.Add(1); f.Fuzz(func(t *testing.T, n int) { t.Fatal("seed") }) }
`,
	} {
		if err := os.WriteFile(filepath.Join(tree, name), []byte(strings.ReplaceAll(text, "FUNC", "func")),
			0o600); err != nil {
			t.Fatal(err)
		}
	}
	// Compile first: otherwise the concurrent targets would each compile the standard library for fuzzing.
	compile := exec.CommandContext(t.Context(), "go", "test", "-c", "-fuzz", ".", "-o", os.DevNull, "./internal/x")
	compile.Dir = tree
	if said, err := compile.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", compile.Args, err, said)
	}
	found, err := targets(tree, "")
	if err != nil || len(found) != 3 {
		t.Fatalf("got %d targets: %v", len(found), err)
	}
	var out bytes.Buffer
	if failed := runAll(context.Background(), found, time.Second, 3, &out); failed != 2 {
		t.Errorf("%d failed", failed)
	}
	clean, finds, seed := found[0], found[1], found[2]
	if clean.err != nil || clean.runs == 0 {
		t.Errorf("clean target: got %d runs, error %v", clean.runs, clean.err)
	}
	if _, err := os.Stat(finds.input); err != nil {
		t.Errorf("the failing input does not exist: %v", err)
	}
	if !strings.HasPrefix(seed.input, "FuzzSeed/seed#0") {
		t.Errorf("got failing seed %q", seed.input)
	}
	for _, want := range []string{"FuzzClean", "clean", "FAILED by " + finds.input, "3 targets, 2 failed"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the report lacks %q:\n%s", want, &out)
		}
	}
}

// TestTimeIsUp: a target has not failed if a worker was processing an input when the time ended, but has failed if a
// worker wrote a failing input.
func TestTimeIsUp(t *testing.T) {
	const said = "fuzz: elapsed: 10s, execs: 900 (90/sec), new interesting: 3 (total: 9)\n--- FAIL: FuzzCall " +
		"(10.46s)\n    context deadline exceeded\nFAIL\n"
	for want, text := range map[string]string{
		"clean":             said,
		"FAILED by x/found": strings.Replace(said, "FAIL\n", "    Failing input written to found\nFAIL\n", 1),
		"FAILED: exit":      strings.Replace(said, "execs: 900", "execs: 0", 1),
	} {
		ended := &target{folder: "x", said: []byte(text), err: errors.New("exit")}
		ended.read()
		if got := ended.verdict(); got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
}

// TestTimeForKnownInputsOnly: the table shows if the time was not enough for new inputs.
func TestTimeForKnownInputsOnly(t *testing.T) {
	short := &target{said: []byte("fuzz: elapsed: 0s, gathering baseline coverage: 0/86 completed\nfuzz: elapsed: " +
		"2s, gathering baseline coverage: 80/86 completed\nPASS\n")}
	short.read()
	if got := short.verdict(); short.err != nil || !strings.Contains(got, "80/86") {
		t.Errorf("got %s, error %v", got, short.err)
	}
	none := &target{said: []byte("PASS\n")}
	if none.read(); none.err == nil {
		t.Error("a target without tried inputs passed")
	}
}
