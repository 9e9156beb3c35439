package restart_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
)

// damage is a way to damage a file, and the error that the agent then prints together with the file's path.
type damage struct {
	name string
	do   func(path string) error
	said string
}

func damages() []damage {
	write := func(text string) func(string) error {
		return func(path string) error { return os.WriteFile(path, []byte(text), 0o600) }
	}
	return []damage{
		{"missing", os.Remove, "missing"},
		{"empty", write(""), "it is empty"},
		{"cut off", func(path string) error { return os.Truncate(path, 20) }, "unexpected EOF"},
		{"garbage", write("\x00\xff garbage\n"), "invalid character"},
		{"of a later build", func(path string) error {
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			later := strings.Replace(string(text), `"version": 1,`, `"version": 99, "later": true,`, 1)
			return os.WriteFile(path, []byte(later), 0o600)
		}, "a later build wrote it"},
	}
}

// TestDamagedState: if the node's identity is unusable, a record is missing, or a file is from a later build, the agent
// does not start, names the file and the remedy, and changes nothing. It sets any other damaged file aside and starts.
// The node's containers keep their connections, except a container whose own record is damaged.
func TestDamagedState(t *testing.T) {
	l := labtest.New(t, lab.Spec{
		Nodes:   []string{"n1", "n2"},
		Tenants: []lab.Tenant{{Name: "blue"}},
		Containers: []lab.Container{
			{Name: "left", Node: "n1", Tenant: "blue"},
			{Name: "right", Node: "n2", Tenant: "blue"},
		},
	})
	s := &state{T: t, lab: l, folder: filepath.Join(l.Folder(), "nodes", "n1", "state")}
	seen := map[string]bool{s.addAndRemove(): true} // writes the log of released addresses
	prefix := s.status().Node.Prefix
	s.argv, s.seen = s.commandLine(), seen

	sending, stop := context.WithCancel(t.Context())
	defer stop()
	start := time.Now()
	streams := []*stream{startStream(sending, t, l, "left", "right"), startStream(sending, t, l, "right", "left")}

	s.must(l.Stop(t.Context(), lab.AgentProcess("n1")))
	for _, file := range []string{"node.json", "endpoints/*.json", "cursors/*.json", "tenants/blue.json"} {
		for _, d := range damages() {
			t.Run(strings.ReplaceAll(file, "/", " ")+" "+d.name, func(t *testing.T) {
				switch {
				case file == "node.json", d.name == "of a later build",
					file == "endpoints/*.json" && d.name == "missing":
					s.on(t).refuses(file, d)
				case file == "endpoints/*.json":
					s.on(t).losesEndpoint(d)
				default:
					s.on(t).startsWithout(file, d)
				}
			})
		}
	}
	t.Run("released garbage", func(t *testing.T) {
		d := damages()[3]
		d.said = "line 1"
		s.on(t).startsWithout("cursors/*.released", d)
	})
	t.Run("read-only", func(t *testing.T) { s.on(t).readOnly() })
	t.Run("certificate", func(t *testing.T) { s.on(t).withoutCertificate() })
	t.Run("full", func(t *testing.T) { s.on(t).full() })

	s.must(l.Start(t.Context(), lab.AgentProcess("n1")))
	if got := s.status().Node.Prefix; got != prefix {
		t.Errorf("the prefix changed from %s to %s", prefix, got)
	}
	if a := s.addAndRemove(); seen[a] {
		t.Errorf("address %s was allocated twice", a)
	}
	stop()
	for _, stream := range streams {
		stream.finish(t, start)
	}
}

// state is the folder of an agent's files.
type state struct {
	*testing.T
	lab    *lab.Lab
	folder string
	argv   []string // arguments of the agent
	names  int
	seen   map[string]bool // addresses that were allocated
}

func (s *state) on(t *testing.T) *state {
	c := *s
	c.T = t
	return &c
}

func (s *state) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

func (s *state) status() *pilasterv1.StatusResponse {
	s.Helper()
	r, err := s.lab.Agent("n1").Status(s.Context(), connect.NewRequest(&pilasterv1.StatusRequest{}))
	s.must(err)
	return r.Msg
}

func (s *state) commandLine() []string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", agentPID(s.Context(), s.T, s.lab, "n1")))
	s.must(err)
	return strings.Split(strings.TrimRight(string(text), "\x00"), "\x00")
}

func (s *state) container() lab.Container {
	s.names++
	return lab.Container{Name: fmt.Sprintf("s%d-%d", s.names, time.Now().UnixNano()%1e6), Node: "n1", Tenant: "blue"}
}

// addAndRemove adds and removes a container, and returns its address.
func (s *state) addAndRemove() string {
	s.Helper()
	c := s.container()
	s.must(s.lab.AddContainer(s.Context(), c))
	a, err := s.lab.Address(c.Name)
	s.must(err)
	s.must(s.lab.RemoveContainer(s.Context(), c.Name))
	return a.String()
}

// says starts the agent, which must fail, and returns its output.
func (s *state) says() string {
	s.Helper()
	ns, err := s.lab.Namespace("n1")
	s.must(err)
	defer ns.Close()
	ctx, cancel := context.WithTimeout(s.Context(), labtest.Patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, s.argv[0], s.argv[1:]...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	var exit *exec.ExitError
	if err := ns.Run(cmd); !errors.As(err, &exit) || ctx.Err() != nil {
		s.Fatalf("the agent exited with %v: %s", err, out.String())
	}
	return out.String()
}

// starts matches a counter that each start of the agent increments, even if the start fails.
var starts = regexp.MustCompile(`"starts": \d+`)

// files returns the contents of all files of the folder, by path.
func (s *state) files() map[string]string {
	files := map[string]string{}
	s.must(filepath.WalkDir(s.folder, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		files[path] = starts.ReplaceAllString(string(text), "")
		return err
	}))
	return files
}

func (s *state) refuses(pattern string, d damage) {
	paths, err := filepath.Glob(filepath.Join(s.folder, pattern))
	if err != nil || len(paths) != 1 {
		s.Fatalf("%s is %q, %v", pattern, paths, err)
	}
	path := paths[0]
	whole, err := os.ReadFile(path)
	s.must(err)
	s.must(d.do(path))
	spoilt := s.files()
	said := s.says()
	for _, want := range []string{path, d.said, "nothing was changed", "restore the file",
		"packets of containers flow as before"} {
		if !strings.Contains(said, want) {
			s.Errorf("the output lacks %q: %s", want, said)
		}
	}
	if after := s.files(); fmt.Sprint(after) != fmt.Sprint(spoilt) {
		s.Errorf("files were changed:\n%q\n%q", spoilt, after)
	}
	s.must(os.WriteFile(path, whole, 0o600))
}

// startsWithout damages a file that the agent can derive, or receive from the orchestrator. The agent must start,
// report the file, and give new containers unused addresses, and its next start must find valid files. There is no file
// to set aside if the damage is that it is missing.
func (s *state) startsWithout(pattern string, d damage) {
	s.startsDamaged(s.one(pattern), d)
	for range 2 {
		if a := s.addAndRemove(); s.seen[a] {
			s.Errorf("address %s was allocated twice", a)
		} else {
			s.seen[a] = true
		}
	}
	s.must(s.lab.Stop(s.Context(), lab.AgentProcess("n1")))
	s.must(s.lab.Start(s.Context(), lab.AgentProcess("n1")))
	if got := strings.Join(s.status().Problems, "\n"); strings.Contains(got, s.folder) {
		s.Errorf("the next start reports %q", got)
	}
	s.must(s.lab.Stop(s.Context(), lab.AgentProcess("n1")))
}

// losesEndpoint adds a container and damages the record of its endpoint. The agent must remove the endpoint, and DEL
// must succeed.
func (s *state) losesEndpoint(d damage) {
	before, err := filepath.Glob(filepath.Join(s.folder, "endpoints/*.json"))
	s.must(err)
	c := s.container()
	s.must(s.lab.Start(s.Context(), lab.AgentProcess("n1")))
	s.must(s.lab.AddContainer(s.Context(), c))
	a, err := s.lab.Address(c.Name)
	s.must(err)
	s.seen[a.String()] = true
	s.must(s.lab.Stop(s.Context(), lab.AgentProcess("n1")))
	after, err := filepath.Glob(filepath.Join(s.folder, "endpoints/*.json"))
	s.must(err)
	after = slices.DeleteFunc(after, func(path string) bool { return slices.Contains(before, path) })
	if len(after) != 1 {
		s.Fatalf("got records %q, want one of %s", after, c.Name)
	}
	s.startsDamaged(after[0], d)
	s.must(s.lab.RemoveContainer(s.Context(), c.Name))
	if a := s.addAndRemove(); s.seen[a] {
		s.Errorf("address %s was allocated twice", a)
	}
	s.must(s.lab.Stop(s.Context(), lab.AgentProcess("n1")))
	aside, err := filepath.Glob(after[0] + ".damaged-*")
	s.must(err)
	for _, path := range aside { // a later container may get the same number
		s.must(os.Remove(path))
	}
}

func (s *state) one(pattern string) string {
	s.Helper()
	paths, err := filepath.Glob(filepath.Join(s.folder, pattern))
	if err != nil || len(paths) != 1 {
		s.Fatalf("%s is %q, %v", pattern, paths, err)
	}
	return paths[0]
}

// startsDamaged starts the agent with a damaged file, which it must set aside.
func (s *state) startsDamaged(path string, d damage) {
	s.Helper()
	s.must(d.do(path))
	s.must(s.lab.Start(s.Context(), lab.AgentProcess("n1")))
	aside, err := filepath.Glob(path + ".damaged-*")
	if s.must(err); (len(aside) > 0) != (d.name != "missing") {
		s.Errorf("set aside: got %q", aside)
	}
	// The agent may already have replaced a tenant's file by the orchestrator's data.
	got := strings.Join(s.status().Problems, "\n")
	if !strings.Contains(got, path) && !strings.Contains(path, "tenants") {
		s.Errorf("got problems %q, want one with %s", got, path)
	}
}

// readOnly tests a disk that the kernel remounted read-only after an error.
func (s *state) readOnly() {
	s.must(unix.Mount(s.folder, s.folder, "", unix.MS_BIND, ""))
	defer unix.Unmount(s.folder, unix.MNT_DETACH)
	s.must(unix.Mount("", s.folder, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	if said := s.says(); !strings.Contains(said, s.folder) || !strings.Contains(said, "read-only file system") ||
		!strings.Contains(said, "writable") {
		s.Errorf("unexpected output: %s", said)
	}
}

// withoutCertificate damages the certificate. The agent must start from its existing state, which needs no certificate.
// While no orchestrator runs, it cannot get a new certificate and must name the file.
func (s *state) withoutCertificate() {
	path := filepath.Join(s.folder, "member.pem")
	whole, err := os.ReadFile(path)
	s.must(err)
	s.must(os.WriteFile(path, whole[:100], 0o600))
	s.must(s.lab.Start(s.Context(), lab.AgentProcess("n1")))
	s.addAndRemove()
	said := ""
	for deadline := time.Now().Add(patience); said == "" && time.Now().Before(deadline); time.Sleep(reread) {
		said = s.status().Orchestrator.LastError
	}
	if !strings.Contains(said, path) || !strings.Contains(said, "--token-file") {
		s.Errorf("unexpected output: %q", said)
	}
	s.must(s.lab.Stop(s.Context(), lab.AgentProcess("n1")))
	s.must(os.WriteFile(path, whole, 0o600))
}

// full tests a full disk: no container can be added, but existing containers can be removed.
func (s *state) full() {
	goes := s.container()
	s.must(s.lab.Start(s.Context(), lab.AgentProcess("n1")))
	s.must(s.lab.AddContainer(s.Context(), goes))
	s.must(s.lab.Stop(s.Context(), lab.AgentProcess("n1")))

	copied := s.TempDir()
	s.must(os.CopyFS(copied, os.DirFS(s.folder)))
	s.must(unix.Mount("tmpfs", s.folder, "tmpfs", 0, "size=256k,mode=0700"))
	defer unix.Unmount(s.folder, unix.MNT_DETACH)
	s.must(os.CopyFS(s.folder, os.DirFS(copied)))
	filler, err := os.Create(filepath.Join(s.folder, "filler"))
	s.must(err)
	defer filler.Close()
	for err == nil {
		_, err = filler.Write(make([]byte, 4096))
	}

	s.must(s.lab.Start(s.Context(), lab.AgentProcess("n1")))
	if err := s.lab.AddContainer(s.Context(), s.container()); err == nil ||
		!strings.Contains(err.Error(), "make room on the disk of "+s.folder) {
		s.Errorf("ADD on a full disk: got error %v", err)
	}
	s.must(s.lab.RemoveContainer(s.Context(), goes.Name))
	s.must(s.lab.Stop(s.Context(), lab.AgentProcess("n1")))
	// The file system below the mount has an older state with a record of the removed container. The agent removes this
	// record.
}
