package restart_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"pilaster.io/pilaster/internal/lab"
	"pilaster.io/pilaster/internal/lab/labtest"
	"pilaster.io/pilaster/internal/netns"
)

// plugin runs the CNI plugin as a runtime does, with the verb and the namespace in the environment and the
// configuration on standard input.
type plugin struct {
	binary string
	config string // path of a file
	name   string // prefix of the containers' IDs
	dir    string // folder of their namespaces
}

// newPlugin creates n namespaces, and a plugin for them.
func newPlugin(t *testing.T, l *lab.Lab, n int) *plugin {
	t.Helper()
	list, err := l.CNIConfig(lab.Container{Node: node, Tenant: "blue", Labels: map[string]string{"app": "web"}})
	if err != nil {
		t.Fatal(err)
	}
	var config struct {
		Name, CNIVersion string
		Plugins          []map[string]any
	}
	if err := json.Unmarshal(list, &config); err != nil {
		t.Fatal(err)
	}
	one := config.Plugins[0]
	one["name"], one["cniVersion"] = config.Name, config.CNIVersion
	p := &plugin{
		binary: filepath.Join(filepath.Dir(labtest.Binary(t)), "pilaster-cni"),
		name:   l.Name(), dir: filepath.Join("/run", l.Name()),
	}
	p.config = filepath.Join(t.TempDir(), "config")
	text, err := json.Marshal(one)
	if err == nil {
		err = os.WriteFile(p.config, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for i := range n {
			if err := netns.Remove(p.netns(i)); err != nil {
				t.Error(err)
			}
		}
		if err := os.Remove(p.dir); err != nil {
			t.Error(err)
		}
	})
	for i := range n {
		ns, err := netns.Create(p.netns(i))
		if err != nil {
			t.Fatal(err)
		}
		ns.Close()
	}
	return p
}

func (p *plugin) netns(i int) string { return filepath.Join(p.dir, fmt.Sprint("c", i)) }

// run calls the plugin once for container i. It returns the duration and the CPU time of the plugin.
func (p *plugin) run(ctx context.Context, verb string, i int) (wall, cpu time.Duration, err error) {
	if err := ctx.Err(); err != nil {
		return 0, 0, err
	}
	// Use plain files for its input and output, so that the duration includes as little other work as possible.
	stdin, err := os.Open(p.config)
	if err != nil {
		return 0, 0, err
	}
	defer stdin.Close()
	said, out, err := os.Pipe()
	if err != nil {
		return 0, 0, err
	}
	defer said.Close()
	environment := []string{
		"CNI_COMMAND=" + verb, fmt.Sprintf("CNI_CONTAINERID=%s-c%d", p.name, i),
		"CNI_NETNS=" + p.netns(i), "CNI_IFNAME=" + lab.Interface, "CNI_PATH=" + filepath.Dir(p.binary),
	}
	start := time.Now()
	process, err := os.StartProcess(p.binary, []string{p.binary},
		&os.ProcAttr{Env: environment, Files: []*os.File{stdin, out, out}})
	out.Close()
	if err != nil {
		return 0, 0, err
	}
	state, err := process.Wait()
	wall = time.Since(start)
	if err == nil && !state.Success() {
		text, _ := io.ReadAll(said)
		err = fmt.Errorf("%v\n%s", state, text)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("%s of container %d: %w", verb, i, err)
	}
	return wall, state.UserTime() + state.SystemTime(), nil
}

// each runs the verb for the containers from..to-1, inFlight at a time. It returns the durations, sorted, and the total
// CPU time of the plugins.
func (p *plugin) each(ctx context.Context, verb string, from, to, inFlight int) (walls []time.Duration,
	cpu time.Duration, err error) {
	walls = make([]time.Duration, to-from)
	var sum atomic.Int64
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(inFlight)
	for i := range walls {
		group.Go(func() error {
			wall, cpu, err := p.run(ctx, verb, from+i)
			walls[i] = wall
			sum.Add(int64(cpu))
			return err
		})
	}
	err = group.Wait()
	slices.Sort(walls)
	return walls, time.Duration(sum.Load()), err
}

func median(sorted []time.Duration) time.Duration { return percentile(sorted, 50) }

// percentile returns the smallest of the durations that at least p percent of them do not exceed.
func percentile(sorted []time.Duration, p int) time.Duration {
	return sorted[(len(sorted)*p+99)/100-1]
}
