package lab

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	pilasterv1 "pilaster.io/pilaster/api/pilaster/v1"
)

// TestStateOfSeveralProcesses: concurrent commands, each of which read the state when it started, keep each other's
// changes and do not restore removed containers.
func TestStateOfSeveralProcesses(t *testing.T) {
	root := t.TempDir()
	f := folder(filepath.Join(root, "demo"))
	if err := os.MkdirAll(f.path("hosts"), 0o755); err != nil {
		t.Fatal(err)
	}
	first := newLab(f)
	for _, name := range []string{"moves", "goes"} {
		first.state.Containers = append(first.state.Containers, ContainerStatus{Container: Container{Name: name}})
	}
	if err := first.save(); err != nil {
		t.Fatal(err)
	}
	const processes, each = 8, 20
	var running sync.WaitGroup
	for p := range processes {
		l, err := Open(root, "demo")
		if err != nil {
			t.Fatal(err)
		}
		running.Go(func() {
			for i := range each {
				reports := map[string]*pilasterv1.Endpoint{}
				for _, name := range []string{"demo-moves", "demo-goes"} {
					reports[name] = &pilasterv1.Endpoint{
						Attachments: []*pilasterv1.Attachment{
							{Network: "nimitz", Address: fmt.Sprintf("fd00::%x:%x", p+1, i)},
						},
					}
				}
				if err := l.keep(ContainerStatus{Container: Container{Name: fmt.Sprint(p, "-", i)}}); err != nil {
					t.Error(err)
				}
				if err := l.merge(reports); err != nil {
					t.Error(err)
				}
				if err := l.forget("goes"); err != nil {
					t.Error(err)
				}
			}
		})
	}
	running.Wait()
	l, err := Open(root, "demo")
	if err != nil {
		t.Fatal(err)
	}
	if n := len(l.Containers()); n != 1+processes*each {
		t.Errorf("got %d containers, want %d", n, 1+processes*each)
	}
	if _, err := l.Container("goes"); err == nil {
		t.Error("a removed container is present again")
	}
	if c, err := l.Container("moves"); err != nil || !c.on("nimitz") {
		t.Errorf("unexpected attachments of the moved container: %+v, %v", c, err)
	}
}
