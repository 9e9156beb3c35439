package accelerate_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/cli"
)

// TestGuide runs the commands with output of docs/howto/accelerate.md. A line "…" stands for any lines, "…" in a line
// for any text.
func TestGuide(t *testing.T) {
	page, err := os.ReadFile("../../docs/howto/accelerate.md")
	must(t, err)
	both := flannel(t)
	n := both[0]
	ip(t, n.ns, tracking)
	n.accelerate(t)
	c := talk(t, n.only(), both[1].only())
	must(t, c.echo(50))
	ran := 0
	for _, block := range regexp.MustCompile("(?ms)^```console\n(.*?)^```$").FindAllStringSubmatch(string(page), -1) {
		for _, step := range strings.Split("\n"+block[1], "\n$ ")[1:] {
			line, want, _ := strings.Cut(step, "\n")
			ran++
			said, err := output(n.ns, command(strings.TrimPrefix(line, "pilaster ")+" --socket "+n.socket()))
			if err != nil {
				t.Errorf("%s: %v: %s", line, err, said)
			}
			pattern := regexp.QuoteMeta(strings.TrimSuffix(want, "\n"))
			pattern = strings.ReplaceAll(pattern, "\n…", "(?:\n.*)*?")
			pattern = strings.ReplaceAll(pattern, "…", ".*")
			if !regexp.MustCompile("^" + pattern + "$").MatchString(strings.TrimSpace(said)) {
				t.Errorf("%s: got\n%s\nwant\n%s", line, said, want)
			}
		}
	}
	if ran != 5 {
		t.Errorf("ran %d commands, the page has 5", ran)
	}
	must(t, c.echo(50))
}

// TestMetrics compares the metrics with their list in docs/reference/metrics.md.
func TestMetrics(t *testing.T) {
	page, err := os.ReadFile("../../docs/reference/metrics.md")
	must(t, err)
	n := flannel(t)[0]
	n.accelerate(t)
	said, err := output(n.ns, command("metrics accelerate --accelerate-socket "+n.socket()))
	must(t, err)
	listed, served := map[string]bool{}, map[string]bool{}
	row := regexp.MustCompile("(?m)^\\| `(pilaster_accelerate_[a-z_]+)` \\| ([a-z]+)")
	for _, m := range row.FindAllStringSubmatch(string(page), -1) {
		listed[m[1]+" "+m[2]] = true
	}
	for _, m := range regexp.MustCompile("(?m)^# TYPE (pilaster_[a-z_]+ [a-z]+)$").FindAllStringSubmatch(said, -1) {
		served[m[1]] = true
		if !listed[m[1]] {
			t.Errorf("docs/reference/metrics.md does not list %s", m[1])
		}
	}
	for name := range listed {
		if !served[name] {
			t.Errorf("the daemon does not serve %s", name)
		}
	}
	if len(served) < 8 {
		t.Errorf("%d metrics, want at least 8", len(served))
	}
}

// The exit code is 3 without a daemon, and 1 if the state does not permit the command. What is not there needs no
// eviction, and what is not attached no reset.
func TestExitCodes(t *testing.T) {
	n := flannel(t)[0]
	run := func(line string, want int, says string) {
		t.Helper()
		c := command("accelerate " + line + " --socket " + n.socket())
		said, err := output(n.ns, c)
		if code := c.ProcessState.ExitCode(); code != want || !strings.Contains(said, says) {
			t.Errorf("%s: got exit code %d: %s%v; want %d and %q", line, code, said, err, want, says)
		}
	}
	for _, line := range []string{"status", "pause", "evict --all", "resume"} {
		run(line, cli.ExitUnreachable, "no daemon listens")
	}
	run("reset", cli.ExitDone, "works without the cache")
	d := n.accelerate(t)
	run("evict --address 10.9.9.9", cli.ExitDone, "evicted 0 entries")
	run("evict --vtep 192.0.2.99", cli.ExitDone, "evicted 0 entries")
	run("evict --container none", cli.ExitFailed, "nothing was evicted")
	run("evict --address none", cli.ExitUsage, "no IP address")
	run("evict", cli.ExitUsage, "at least one of the flags")
	run("pause", cli.ExitDone, "")
	run("pause", cli.ExitDone, "")
	run("status", cli.ExitFailed, "paused by an operator")
	run("resume", cli.ExitDone, "in use")
	run("resume", cli.ExitDone, "in use")
	for range 2 {
		run("reset", cli.ExitDone, "works without the cache")
		<-d.ended
	}
	run("evict --all", cli.ExitUnreachable, "no daemon listens")
	said, err := output(n.ns, command("__complete accelerate --overlay fl"))
	if err != nil || !strings.Contains(said, "flannel.1\n") || strings.Contains(said, "cni0") {
		t.Errorf("completion of --overlay: %v: %s", err, said)
	}
	said, err = output(n.ns, command("__complete accelerate --containers b"))
	if err != nil || !strings.Contains(said, "bridge:cni0\n") {
		t.Errorf("completion of --containers: %v: %s", err, said)
	}
}
