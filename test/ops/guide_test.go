package ops_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/lab/labtest"
)

// step is a command of a guide, the machine on which it runs (empty if the guide has one machine), and the output that
// the guide shows.
type step struct{ machine, command, shown string }

var prompt = regexp.MustCompile(`^(n[0-9])?\$ (.*)`)

// unfinished reports whether a command continues on the next line: after a backslash, or inside quotes.
func unfinished(command string) bool {
	return strings.HasSuffix(command, `\`) || strings.Count(command, "'")%2 == 1
}

// guide reads the steps of a guide. Blocks of yaml that begin with "# NAME.yaml" are files. Blocks of console are
// commands after "$ ", with their output. In the output, "…" matches any text, several spaces match any number of
// spaces, and "(exit status 1)" is the exit status of a command that fails.
func guide(t *testing.T, path string) (files map[string]string, steps []step) {
	t.Helper()
	text, err := os.ReadFile(path)
	must(t, err)
	files = map[string]string{}
	blocks := regexp.MustCompile("(?ms)^```(yaml|console)\n(.*?)^```$")
	for _, block := range blocks.FindAllStringSubmatch(string(text), -1) {
		if name, isFile := strings.CutPrefix(block[2], "# "); block[1] == "yaml" && isFile {
			name, _, _ = strings.Cut(name, "\n")
			files[name] = block[2]
		}
		if block[1] != "console" {
			continue
		}
		for line := range strings.Lines(block[2]) {
			last := len(steps) - 1
			switch m := prompt.FindStringSubmatch(strings.TrimSpace(line)); {
			case m != nil:
				steps = append(steps, step{machine: m[1], command: m[2]})
			case last >= 0 && steps[last].shown == "" && unfinished(steps[last].command):
				steps[last].command += "\n" + strings.TrimSpace(line)
			case last >= 0:
				steps[last].shown += line
			}
		}
	}
	return files, steps
}

// fits reports whether a command's output matches the guide.
func (s step) fits(output string) bool {
	var lines []string
	for line := range strings.Lines(s.shown) {
		words := strings.Fields(line)
		for i, w := range words {
			words[i] = strings.ReplaceAll(regexp.QuoteMeta(w), "…", ".*")
		}
		lines = append(lines, `\s*`+strings.Join(words, `\s+`)+`\s*`)
	}
	return regexp.MustCompile("^" + strings.Join(lines, "\n") + "$").MatchString(strings.TrimSuffix(output, "\n"))
}

// TestPolicyGuide runs docs/howto/policy.md and compares the output.
func TestPolicyGuide(t *testing.T) { follow(t, "../../docs/howto/policy.md", "shop", 2, 19) }

// TestRegionsGuide runs the lab part of docs/howto/regions.md and compares the output.
func TestRegionsGuide(t *testing.T) {
	follow(t, "../../docs/howto/regions.md", "two", 1, 9)
}

// TestTraceGuide runs docs/howto/trace.md and compares the output.
func TestTraceGuide(t *testing.T) { follow(t, "../../docs/howto/trace.md", "hop", 2, 8) }

// TestOffloadGuide runs the lab part of docs/howto/offload.md and compares the output.
func TestOffloadGuide(t *testing.T) { follow(t, "../../docs/howto/offload.md", "share", 2, 9) }

// TestEgressGuide runs the lab part of docs/howto/egress.md and compares the output.
func TestEgressGuide(t *testing.T) { follow(t, "../../docs/howto/egress.md", "out", 1, 7) }

// follow runs a guide with its own lab, and compares the output. called is the lab's name in the guide; the test
// replaces it by a unique name.
func follow(t *testing.T, page, called string, leastFiles, leastSteps int) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	ctx := labtest.Context(t)
	files, steps := guide(t, page)
	dir, name := t.TempDir(), labtest.Name(t)
	for file, text := range files {
		text = strings.Replace(text, "name: "+called+"\n", "name: "+name+"\n", 1)
		must(t, os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600))
	}
	root := filepath.Join("/run", name) // short enough for a socket's path
	env := append(os.Environ(), "PATH="+filepath.Dir(labtest.Binary(t))+":"+os.Getenv("PATH"),
		"PILASTER_LAB_ROOT="+root)
	run := func(ctx context.Context, command string) (string, error) {
		var out, complaint bytes.Buffer
		cmd := exec.CommandContext(ctx, "bash", "-c", command)
		cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = dir, env, &out, &complaint
		err := cmd.Run()
		if exit := new(exec.ExitError); errors.As(err, &exit) {
			out.WriteString("(" + exit.Error() + ")\n")
			err = nil
		}
		if complaint.Len() > 0 {
			t.Logf("%s", &complaint)
		}
		return out.String(), err
	}
	t.Cleanup(func() {
		if t.Failed() { // otherwise the guide has removed the lab
			_, _ = run(context.Background(), "pilaster lab down "+name)
		}
		os.RemoveAll(root)
	})
	variables := ""
	for _, s := range steps {
		if regexp.MustCompile(`^[A-Z]+=`).MatchString(s.command) {
			variables += s.command + "; "
			continue
		}
		// IDs of containers begin with the lab's name.
		out, err := run(ctx, variables+strings.ReplaceAll(s.command, called+"-", name+"-"))
		must(t, err)
		out = strings.ReplaceAll(out, name, called)
		if !s.fits(out) {
			t.Fatalf("$ %s\n%s\nwant, by the guide,\n%s", s.command, out, s.shown)
		}
	}
	if len(files) < leastFiles || len(steps) < leastSteps {
		t.Errorf("the guide has %d files and %d commands, want more", len(files), len(steps))
	}
}

// TestGuideIsCompared: fits rejects wrong output.
func TestGuideIsCompared(t *testing.T) {
	for _, c := range []struct {
		shown, output string
		fits          bool
	}{
		{"", "", true}, {"", "more\n", false}, {"a  b\n", "a b\n", true}, {"a b\n", "a b\nc\n", false},
		{"a … c\n", "a b b c\n", true}, {"a … c\n", "a b\n", false},
		{"x\n(exit status 1)\n", "x\n(exit status 1)\n", true}, {"x\n", "x\n(exit status 1)\n", false},
		{"1 (of 2)\n", "1 (of 3)\n", false}, {"a\nb\n", "a\n", false},
	} {
		if (step{shown: c.shown}).fits(c.output) != c.fits {
			t.Errorf("%q, shown as %q, fits: %v", c.output, c.shown, !c.fits)
		}
	}
}
