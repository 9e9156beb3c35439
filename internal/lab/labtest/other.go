package labtest

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

var other struct {
	sync.Once
	binary string
	err    error
}

// OtherVersion ends the version of OtherBinary's build.
const OtherVersion = "-other"

// OtherBinary is the path of a pilaster binary made from this source tree as a later one could be: with
// other programs, every pinned map under another name, and entries that are laid out differently; but for sessions,
// which are of a version that most builds share. A folder of its own holds it and pilaster-cni.
func OtherBinary(t testing.TB) string {
	t.Helper()
	here := Binary(t)
	other.Do(func() { other.binary, other.err = makeOther(filepath.Dir(filepath.Dir(here))) })
	if other.err != nil {
		t.Fatal(other.err)
	}
	return other.binary
}

func makeOther(tree string) (string, error) {
	folder := filepath.Join(tree, "bin", ".other") // ./... leaves it out
	unlock, err := lock(tree)
	if err != nil {
		return "", err
	}
	defer unlock()
	if err := os.RemoveAll(folder); err != nil {
		return "", err
	}
	c, generated := filepath.Join(folder, "bpf"), filepath.Join(folder, "datapath")
	for _, dir := range []string{c, generated} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return "", err
		}
	}
	if err := rewriteAll(filepath.Join(tree, "bpf"), "*.[ch]", c, otherC); err != nil {
		return "", err
	}
	datapath := filepath.Join(tree, "internal", "datapath")
	if err := rewriteAll(datapath, "*.go", generated, otherGo); err != nil {
		return "", err
	}
	version := filepath.Join(tree, "internal", "version", "version.go")
	if err := rewrite(version, filepath.Join(folder, "version.go"), otherVersion); err != nil {
		return "", err
	}
	if err := generate(datapath, c, generated); err != nil {
		return "", err
	}

	replace := map[string]string{version: filepath.Join(folder, "version.go")}
	files, err := os.ReadDir(generated)
	if err != nil {
		return "", err
	}
	for _, f := range files {
		replace[filepath.Join(datapath, f.Name())] = filepath.Join(generated, f.Name())
	}
	overlay := filepath.Join(folder, "overlay.json")
	text, err := json.Marshal(map[string]map[string]string{"Replace": replace})
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(overlay, text, 0o600); err != nil {
		return "", err
	}
	binary := filepath.Join(folder, "pilaster")
	build := exec.Command("go", "build", "-overlay", overlay, "-o", binary, "./cmd/pilaster")
	build.Dir = tree
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build with other programs: %w\n%s", err, out)
	}
	return binary, os.Symlink(filepath.Join(tree, "bin", "pilaster-cni"), filepath.Join(folder, "pilaster-cni"))
}

// generate does what go generate does, with the sources in c.
func generate(datapath, c, out string) error {
	doc, err := os.ReadFile(filepath.Join(datapath, "doc.go"))
	if err != nil {
		return err
	}
	_, rest, _ := strings.Cut(string(doc), "//go:generate ")
	line, _, _ := strings.Cut(rest, "\n")
	command := strings.Fields(line)
	tool, source := slices.Index(command, "bpf2go"), slices.Index(command, "../../bpf/pilaster.bpf.c")
	if tool < 0 || source < 0 {
		return fmt.Errorf("%s/doc.go generates by another command: %q", datapath, command)
	}
	command[source] = filepath.Join(c, "pilaster.bpf.c")
	command = slices.Insert(command, tool+1, "-output-dir", out)
	run := exec.Command(command[0], command[1:]...)
	run.Dir = datapath
	if said, err := run.CombinedOutput(); err != nil {
		return fmt.Errorf("compile other programs: %w\n%s", err, said)
	}
	return nil
}

// rewriteAll writes what becomes of a folder's files into another one.
func rewriteAll(from, pattern, to string, change func(string) string) error {
	paths, err := filepath.Glob(filepath.Join(from, pattern))
	if err != nil {
		return err
	}
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		if err := rewrite(path, filepath.Join(to, filepath.Base(path)), change); err != nil {
			return err
		}
	}
	return nil
}

func rewrite(from, to string, change func(string) string) error {
	text, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, []byte(change(string(text))), 0o600)
}

var (
	mapInC  = regexp.MustCompile(`\b((?:pil|nim|pol)_[a-z_]+)_v\d+\b`)
	mapInGo = regexp.MustCompile(`((?:Pil|Nim|Pol)[A-Z][A-Za-z]*)V\d+\b`)
	// What is remembered of conversations goes from one build to the next.
	kept    = regexp.MustCompile(`^(pil_sessions?_|PilSessions?[A-Z])`)
	entries = regexp.MustCompile(`(?m)^struct (source|local|tenant) \{\n`)
	sizes   = regexp.MustCompile(`(sizeof\(struct (?:source|local|tenant)\) == )(\d+)`)
	// Counters begin with the packets in every layout.
	counters = regexp.MustCompile(`(?s)(struct drop_state \{.*?)\n\};`)
)

// otherC gives the maps other names, moves all that entries hold and makes counters larger.
func otherC(text string) string {
	text = otherNames(mapInC, text, "_v99")
	text = entries.ReplaceAllString(text, "${0}\t__u32 other[2];\n")
	text = sizes.ReplaceAllStringFunc(text, func(s string) string {
		m := sizes.FindStringSubmatch(s)
		size, _ := strconv.Atoi(m[2])
		return m[1] + strconv.Itoa(size+8)
	})
	return counters.ReplaceAllString(text, "${1}\n\t__u64 other;\n};")
}

func otherGo(text string) string { return otherNames(mapInGo, text, "V99") }

// IsShared tells of a map that OtherBinary's build has under the same name.
func IsShared(name string) bool { return kept.MatchString(name) }

func otherNames(maps *regexp.Regexp, text, version string) string {
	return maps.ReplaceAllStringFunc(text, func(name string) string {
		if IsShared(name) {
			return name
		}
		return maps.FindStringSubmatch(name)[1] + version
	})
}

func otherVersion(text string) string {
	return strings.Replace(text, "return text\n", "return text + "+strconv.Quote(OtherVersion)+"\n", 1)
}
