package accelerate_test

import (
	"os"
	"regexp"
	"strings"
	"testing"
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
