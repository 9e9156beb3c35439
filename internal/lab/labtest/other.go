package labtest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"pilaster.io/pilaster/internal/version"
)

var other struct {
	sync.Once
	binary string
	err    error
}

// otherVersion is the suffix of the version of makeOther's build.
const otherVersion = "-other"

// givenOther is the variable with the path of a pilaster binary of another release, with its pilaster-cni in the same
// folder. If it is set, upgrade tests run between that release and this tree.
const givenOther = "PILASTER_TEST_OTHER"

// OtherBinary returns the path of a pilaster binary of another build, with its pilaster-cni in the same folder: the one
// that PILASTER_TEST_OTHER names, or one built from this tree with changes that a later release could have. The build
// from this tree has other programs, another name for most pinned maps, and other layouts of entries. Both builds share
// the tables of sessions, of gateways' connections, of services and of mappings: a release that changes their layout
// must convert them.
func OtherBinary(t testing.TB) string {
	t.Helper()
	if given := os.Getenv(givenOther); given != "" {
		out, err := exec.Command(given, "version", "-o", "json").Output()
		if err != nil {
			t.Fatalf("%s=%s: %v", givenOther, given, err)
		}
		if strings.Contains(string(out), strconv.Quote(version.Current().Release)) {
			t.Fatalf("%s=%s also has release %s: the tests cannot distinguish the builds", givenOther, given,
				version.Current().Release)
		}
		return given
	}
	here := Binary(t)
	other.Do(func() { other.binary, other.err = makeOther(filepath.Dir(filepath.Dir(here))) })
	if other.err != nil {
		t.Fatal(other.err)
	}
	return other.binary
}

// OtherIsRelease reports whether OtherBinary is a given binary of another release.
func OtherIsRelease() bool { return os.Getenv(givenOther) != "" }

// OtherHasServices reports whether OtherBinary's build has services.
func OtherHasServices(t testing.TB) bool {
	t.Helper()
	return !OtherIsRelease() || otherKnows(t, "--cgroup-root")
}

// otherKnows reports whether the agent of the given release has a flag.
func otherKnows(t testing.TB, flag string) bool {
	t.Helper()
	help, err := exec.Command(os.Getenv(givenOther), "agent", "--help").Output()
	if err != nil {
		t.Fatalf("%s: %v", givenOther, err)
	}
	return strings.Contains(string(help), flag)
}

// IsOther reports whether an agent's version is the version of OtherBinary's build.
func IsOther(reported string) bool {
	if OtherIsRelease() {
		return !strings.HasPrefix(reported, version.Current().Release)
	}
	return strings.HasSuffix(reported, otherVersion)
}

func makeOther(tree string) (string, error) {
	folder := filepath.Join(tree, "bin", ".other") // ./... excludes it
	unlock, err := lock(tree)
	if err != nil {
		return "", err
	}
	defer unlock()
	if err := os.RemoveAll(folder); err != nil {
		return "", err
	}
	if err := otherSources(tree, folder); err != nil {
		return "", err
	}
	c, generated := filepath.Join(folder, "bpf"), filepath.Join(folder, "datapath")
	datapath := filepath.Join(tree, "internal", "datapath")
	// The objects of networks share maps with that of the data path, by name.
	tables, err := filepath.Glob(filepath.Join(tree, "internal", "network", "*", "tables"))
	if err != nil || len(tables) == 0 {
		return "", fmt.Errorf("no network has an object file of its own: %w", err)
	}
	folders := map[string]string{generated: datapath}
	for i, of := range usersOfMaps {
		folders[filepath.Join(folder, fmt.Sprint("users", i))] = filepath.Join(tree, of)
	}
	err = generate(filepath.Join(datapath, "bpfobj"), c, filepath.Join(generated, "bpfobj"))
	for i, of := range tables {
		out := filepath.Join(folder, fmt.Sprint("network", i))
		folders[out] = of
		err = errors.Join(err, os.MkdirAll(out, 0o755), generate(of, c, out))
	}
	if err != nil {
		return "", err
	}

	replace := map[string]string{versionFile(tree): filepath.Join(folder, "version.go")}
	for from, to := range folders {
		err = filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			name, err := filepath.Rel(from, path)
			replace[filepath.Join(to, name)] = path
			return err
		})
		if err != nil {
			return "", err
		}
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

func versionFile(tree string) string { return filepath.Join(tree, "internal", "version", "version.go") }

// otherSources writes the changed sources into a folder: those of bpf/ and internal/datapath, and version.go.
func otherSources(tree, folder string) error {
	r := &rewriter{changed: map[*regexp.Regexp]int{}}
	c, datapath := filepath.Join(folder, "bpf"), filepath.Join(folder, "datapath")
	return errors.Join(
		r.rewriteTree(filepath.Join(tree, "bpf"), c, []string{".c", ".h"}, 29, r.otherC),
		r.rewriteTree(filepath.Join(tree, "internal", "datapath"), datapath, []string{".go"}, 45, r.otherGo),
		r.rewriteUsers(tree, folder),
		rewrite(versionFile(tree), filepath.Join(folder, "version.go"), r.otherVersion),
		r.check(),
	)
}

// usersOfMaps are further packages that name maps of the data path.
var usersOfMaps = []string{"internal/bench/sharing"}

func (r *rewriter) rewriteUsers(tree, folder string) error {
	var errs []error
	for i, of := range usersOfMaps {
		to := filepath.Join(folder, fmt.Sprint("users", i))
		errs = append(errs, r.rewriteTree(filepath.Join(tree, of), to, []string{".go"}, 1, r.otherGo))
	}
	return errors.Join(errs...)
}

// generate runs the package's command of go generate, with the sources in c.
func generate(of, c, out string) error {
	doc, err := os.ReadFile(filepath.Join(of, "doc.go"))
	if err != nil {
		return err
	}
	_, rest, _ := strings.Cut(string(doc), "//go:generate ")
	line, _, _ := strings.Cut(rest, "\n")
	command := strings.Fields(line)
	tool := slices.Index(command, "bpf2go")
	source := slices.IndexFunc(command, func(w string) bool { return strings.HasSuffix(w, ".bpf.c") })
	include := slices.IndexFunc(command, func(w string) bool {
		return strings.HasPrefix(w, "-I") && strings.HasSuffix(w, "/bpf")
	})
	if tool < 0 || source < 0 || include < 0 {
		return fmt.Errorf("%s/doc.go has an unexpected go:generate command: %q", of, command)
	}
	command[source], command[include] = filepath.Join(c, filepath.Base(command[source])), "-I"+c
	command = slices.Insert(command, tool+1, "-output-dir", out)
	run := exec.Command(command[0], command[1:]...)
	run.Dir = of
	if said, err := run.CombinedOutput(); err != nil {
		return fmt.Errorf("compile other programs: %w\n%s", err, said)
	}
	return nil
}

// rewriteTree writes a changed copy of each source file of a folder into another folder, under the same relative path,
// without tests. It fails if it finds fewer files than least, because then the sources have moved.
func (r *rewriter) rewriteTree(from, to string, extensions []string, least int, change func(string) string) error {
	files := 0
	err := filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || strings.HasSuffix(path, "_test.go") ||
			!slices.Contains(extensions, filepath.Ext(path)) {
			return err
		}
		files++
		name, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		if err := os.MkdirAll(filepath.Dir(filepath.Join(to, name)), 0o755); err != nil {
			return err
		}
		return rewrite(path, filepath.Join(to, name), change)
	})
	if err == nil && files < least {
		err = fmt.Errorf("%s has %d source files, expected %d or more; adjust the folders in OtherBinary",
			from, files, least)
	}
	return err
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
	pinInGo = regexp.MustCompile(`"((?:pil|nim|pol)_[a-z_]+)_v\d+"`)
	// Both builds share the session tables, the connections of egress gateways and to exposed ports, services with the
	// numbers that sessions have, and the mappings to other nodes, which no record on the node has.
	kept = regexp.MustCompile(
		`^(pil_sessions?_|PilSessions?[A-Z]|pil_gwnat_|PilGwnatV|pil_svc[a-z]*_|PilSvc[a-z]*V|` +
			`pil_ex[a-z]+_|PilEx[a-z]+V|pil_maglev_|PilMaglevV|nim_fo(rward|reign)_|NimFo(rward|reign)V)`)
	entries = regexp.MustCompile(`(?m)^struct (ep_src|ep_dst|tenant) \{\n`)
	sizes   = regexp.MustCompile(`(sizeof\(struct (?:ep_src|ep_dst|tenant)\) == )(\d+)`)
	// Every layout of drop_state begins with the packet counter.
	counters = regexp.MustCompile(`(?s)(struct drop_state \{.*?)\n\};`)
	release  = regexp.MustCompile(`return text\n`)
)

// The number of replacements that each expression must make in the whole tree. Without this check, an expression could
// match nothing after a rename in the sources, and the other build would equal this one.
var (
	exactly = map[*regexp.Regexp]int{entries: 3, sizes: 3, counters: 1, release: 1}
	atLeast = map[*regexp.Regexp]int{mapInC: 70, mapInGo: 100, pinInGo: 25}
)

// rewriter counts what each expression changes.
type rewriter struct {
	changed map[*regexp.Regexp]int
}

func (r *rewriter) replace(expression *regexp.Regexp, text string, change func(match []string) string) string {
	return expression.ReplaceAllStringFunc(text, func(s string) string {
		changed := change(expression.FindStringSubmatch(s))
		if changed != s {
			r.changed[expression]++
		}
		return changed
	})
}

func (r *rewriter) check() error {
	var errs []error
	for expression, want := range exactly {
		if got := r.changed[expression]; got != want {
			errs = append(errs, fmt.Errorf("%s changed %d places, want %d", expression, got, want))
		}
	}
	for expression, least := range atLeast {
		if got := r.changed[expression]; got < least {
			errs = append(errs, fmt.Errorf("%s changed %d places, want at least %d", expression, got, least))
		}
	}
	return errors.Join(errs...)
}

// otherC renames the maps, moves the fields of entries and enlarges counters.
func (r *rewriter) otherC(text string) string {
	text = r.otherNames(mapInC, text, "_v99")
	text = r.replace(entries, text, func(m []string) string { return m[0] + "\t__u32 other[2];\n" })
	text = r.replace(sizes, text, func(m []string) string {
		size, _ := strconv.Atoi(m[2])
		return m[1] + strconv.Itoa(size+8)
	})
	return r.replace(counters, text, func(m []string) string { return m[1] + "\n\t__u64 other;\n};" })
}

// otherGo renames the maps of the generated file and their pins. All builds share the pin of the mark.
func (r *rewriter) otherGo(text string) string {
	text = r.otherNames(mapInGo, text, "V99")
	return r.replace(pinInGo, text, func(m []string) string {
		if isKept(m[1]+"_") || m[1] == "pil_mark" {
			return m[0]
		}
		return strconv.Quote(m[1] + "_v99")
	})
}

// IsShared reports whether OtherBinary's build has a map under the same name. The tests assume that a given binary of
// another release shares all maps: pins change only with a layout. Networks with an object file of their own keep
// their maps too.
func IsShared(name string) bool {
	return OtherIsRelease() || isKept(name) || !regexp.MustCompile(`^(pil|nim|pol)_`).MatchString(name)
}

func isKept(name string) bool { return kept.MatchString(name) }

func (r *rewriter) otherNames(maps *regexp.Regexp, text, version string) string {
	return r.replace(maps, text, func(m []string) string {
		if isKept(m[0]) {
			return m[0]
		}
		return m[1] + version
	})
}

func (r *rewriter) otherVersion(text string) string {
	return r.replace(release, text, func([]string) string {
		return "return text + " + strconv.Quote(otherVersion) + "\n"
	})
}
