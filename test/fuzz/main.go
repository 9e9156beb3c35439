// Command fuzz runs the fuzz targets of the tree, several at a time, and prints a result table. `go test` itself
// only runs the seeds.
//
//	go run ./test/fuzz -time 10m -parallel 2 [-only 'Tenant|Record']
//
// It exits with 1 if a target failed, and prints the path of the failing input.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"
)

func main() {
	each := flag.Duration("time", 5*time.Second, "duration of each target")
	parallel := flag.Int("parallel", 1, "number of concurrent targets")
	only := flag.String("only", "", "run only targets whose name matches this pattern; empty means all")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	found, err := targets(".", *only)
	if err != nil || len(found) == 0 || *parallel < 1 {
		fmt.Fprintf(os.Stderr, "error: nothing to run: %d targets match %q, %d at once: %v\n", len(found), *only,
			*parallel, err)
		os.Exit(2)
	}
	if failed := runAll(ctx, found, *each, *parallel, os.Stdout); failed > 0 {
		os.Exit(1)
	}
}

// target is one fuzz target and its result.
type target struct {
	folder, name string
	runs, kept   uint64 // inputs tried, and inputs kept because of new coverage
	known        string // if the time was not enough for all known inputs: how many were tried
	took         time.Duration
	input        string // path of the failing input
	err          error
	said         []byte
}

var declared = regexp.MustCompile(`(?m)^func (Fuzz\w*)\(`)

// targets finds the targets in the source, by folder and name.
func targets(tree, only string) (found []*target, err error) {
	wanted, err := regexp.Compile(only)
	if err != nil {
		return nil, err
	}
	err = filepath.WalkDir(filepath.Join(tree, "internal"), func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, name := range declared.FindAllSubmatch(text, -1) {
			if wanted.Match(name[1]) {
				found = append(found, &target{folder: filepath.Dir(path), name: string(name[1])})
			}
		}
		return err
	})
	return found, err
}

func runAll(ctx context.Context, all []*target, each time.Duration, parallel int, out io.Writer) (failed int) {
	var running sync.WaitGroup
	queue := make(chan *target)
	for range parallel {
		running.Go(func() {
			for t := range queue {
				t.run(ctx, each, max(1, runtime.NumCPU()/parallel))
				fmt.Fprintf(out, "%s: %s\n", t.name, t.verdict())
			}
		})
	}
	for _, t := range all {
		queue <- t
	}
	close(queue)
	running.Wait()
	return report(all, out)
}

// run fuzzes the target with the given number of workers. It limits minimization, which would take most of the time.
func (t *target) run(ctx context.Context, each time.Duration, workers int) {
	start := time.Now()
	fuzz := exec.CommandContext(ctx, "go", "test", "-run", "^$", "-fuzz", "^"+t.name+"$", "-fuzztime", each.String(),
		"-parallel", strconv.Itoa(workers), "-fuzzminimizetime", "10x", "-timeout", "0", ".")
	fuzz.Dir = t.folder
	fuzz.Cancel = func() error { return fuzz.Process.Signal(os.Interrupt) }
	t.said, t.err = fuzz.CombinedOutput()
	t.took = time.Since(start)
	t.read()
}

var (
	progress = regexp.MustCompile(`(?m)^fuzz: elapsed: .*execs: (\d+) .*new interesting: (\d+) `)
	written  = regexp.MustCompile(`(?m)^ *Failing input written to (\S+)`)
	baseline = regexp.MustCompile(`(?m)^fuzz: elapsed: .*baseline coverage: (\d+/\d+) completed$`)
	// go also reports this failure if a worker was processing an input when the time ended, although nothing was found.
	timeIsUp = regexp.MustCompile(`(?m)^--- FAIL: \w+ \([\d.]+s\)\n +context deadline exceeded\n`)
	seedFail = regexp.MustCompile(`(?m)^ *failure while testing seed corpus entry: (\S+)`)
)

// read parses go's output.
func (t *target) read() {
	if lines := progress.FindAllSubmatch(t.said, -1); lines != nil {
		last := lines[len(lines)-1]
		t.runs, _ = strconv.ParseUint(string(last[1]), 10, 64)
		t.kept, _ = strconv.ParseUint(string(last[2]), 10, 64)
	}
	if m := written.FindSubmatch(t.said); m != nil {
		t.input = filepath.Join(t.folder, string(m[1]))
	} else if m := seedFail.FindSubmatch(t.said); m != nil {
		t.input = string(m[1]) + " of the source"
	}
	if t.input == "" && t.runs > 0 && timeIsUp.Match(t.said) {
		t.err = nil
	}
	if lines := baseline.FindAllSubmatch(t.said, -1); t.runs == 0 && lines != nil {
		t.known = string(lines[len(lines)-1][1])
	} else if t.err == nil && t.runs == 0 {
		t.err = errors.New("no input was tried")
	}
}

func (t *target) verdict() string {
	switch {
	case t.err == nil && t.known != "":
		return "clean, but the time was enough for " + t.known + " known inputs only"
	case t.err == nil:
		return "clean"
	case t.input != "":
		return "FAILED by " + t.input
	}
	return fmt.Sprintf("FAILED: %v", t.err)
}

// report prints the full output of failed targets and the table; it returns the number of failed targets.
func report(all []*target, out io.Writer) (failed int) {
	for _, t := range all {
		if t.err != nil {
			failed++
			fmt.Fprintf(out, "\n%s in %s:\n%s\n", t.name, t.folder, bytes.TrimSpace(t.said))
		}
	}
	fmt.Fprintln(out)
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "TARGET\tIN\tTIME\tINPUTS\tNEW\tRESULT")
	for _, t := range slices.SortedFunc(slices.Values(all),
		func(a, b *target) int { return strings.Compare(a.folder+a.name, b.folder+b.name) }) {
		fmt.Fprintf(table, "%s\t%s\t%v\t%d\t%d\t%s\n", t.name, t.folder, t.took.Round(time.Second), t.runs, t.kept,
			t.verdict())
	}
	table.Flush()
	fmt.Fprintf(out, "%d targets, %d failed\n", len(all), failed)
	return failed
}
