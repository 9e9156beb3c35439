package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// guest is the first process of the virtual machine: it mounts the host's files as its root, runs the command and
// powers the machine off. It must not use dynamically linked packages.
func guest() {
	status, err := serve()
	if err != nil {
		fmt.Printf("error: in the machine: %v\n", err)
		status = noAnswer
	}
	os.Stdout.Sync()
	unix.IoctlSetInt(1, unix.TCSBRK, 1) // waits until all output has been sent
	port, err := os.OpenFile("/dev/port", os.O_WRONLY, 0)
	if err == nil {
		port.WriteAt([]byte{byte(min(status, 126) + 1)}, exitPort)
	}
	unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

func serve() (status int, err error) {
	if err := mount("devtmpfs", "/dev", "devtmpfs", 0, ""); err != nil {
		return 0, err
	}
	if err := takeOutput("/dev/ttyS1"); err != nil {
		return 0, err
	}
	var j job
	text, err := os.ReadFile("/job")
	if err != nil {
		return 0, err
	}
	if err := json.Unmarshal(text, &j); err != nil {
		return 0, err
	}
	if err := loadModules("/modules"); err != nil {
		return 0, err
	}
	if err := enterFiles(j); err != nil {
		return 0, err
	}
	if err := bringUpLoopback(); err != nil {
		return 0, err
	}
	if err := unix.Sethostname([]byte("vm")); err != nil {
		return 0, err
	}
	files := unix.Rlimit{Cur: 1 << 20, Max: 1 << 20}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return 0, err
	}
	return runCommand(j)
}

// takeOutput makes the serial line stdout and stderr, without conversion.
func takeOutput(device string) error {
	f, err := os.OpenFile(device, os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return err
	}
	line, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	if err != nil {
		return err
	}
	line.Oflag &^= unix.OPOST
	line.Lflag &^= unix.ECHO
	if err := unix.IoctlSetTermios(int(f.Fd()), unix.TCSETS, line); err != nil {
		return err
	}
	for fd := 1; fd <= 2; fd++ {
		if err := unix.Dup3(int(f.Fd()), fd, 0); err != nil {
			return err
		}
	}
	return nil
}

func loadModules(folder string) error {
	modules, err := os.ReadDir(folder) // sorted by name, which is the order to load them
	if err != nil {
		return err
	}
	for _, m := range modules {
		object, err := os.ReadFile(filepath.Join(folder, m.Name()))
		if err != nil {
			return err
		}
		if err := unix.InitModule(object, ""); err != nil {
			return fmt.Errorf("load module %s: %w", m.Name(), err)
		}
	}
	return nil
}

// enterFiles makes the host's files the root, below an in-memory overlay for writes, and mounts the kernel's own file
// systems.
func enterFiles(j job) error {
	const transport = "trans=virtio,version=9p2000.L,msize=512000"
	if err := mount("files", "/files", "9p", unix.MS_RDONLY, transport+",cache=loose"); err != nil {
		return err
	}
	if err := mount("own", "/own", "tmpfs", 0, "size=75%"); err != nil {
		return err
	}
	for _, d := range []string{"/own/upper", "/own/work"} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return err
		}
	}
	if err := mount("root", "/root", "overlay", 0,
		"lowerdir=/files,upperdir=/own/upper,workdir=/own/work"); err != nil {
		return err
	}
	// The host's mounts are not visible in its shared files, so mount the file systems of this kernel.
	if err := os.Chdir("/root"); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	for _, m := range []struct{ path, kind string }{
		{"/dev", "devtmpfs"}, {"/dev/pts", "devpts"}, {"/dev/shm", "tmpfs"}, {"/proc", "proc"}, {"/sys", "sysfs"},
		{"/run", "tmpfs"},
		{"/sys/fs/bpf", "bpf"}, {"/sys/fs/cgroup", "cgroup2"}, {"/sys/kernel/tracing", "tracefs"},
	} {
		if err := mount(m.kind, m.path, m.kind, 0, ""); err != nil {
			return err
		}
	}
	if j.Write != "" {
		if err := mount("write", j.Write, "9p", 0, transport); err != nil {
			return err
		}
	}
	// The kernel loads other modules with modprobe.
	if err := mount(j.Modules, "/lib/modules", "", unix.MS_BIND, ""); err != nil {
		return err
	}
	return makeDeviceFiles("/dev")
}

// makeDeviceFiles creates the device files that load a module when they are opened, such as /dev/net/tun. On other
// machines, udev creates them.
func makeDeviceFiles(folder string) error {
	lists, err := filepath.Glob("/lib/modules/*/modules.devname")
	if err != nil || len(lists) != 1 {
		return fmt.Errorf("%d lists of device files: %w", len(lists), err)
	}
	list, err := os.ReadFile(lists[0])
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(list)) {
		var module, name string
		var kind rune
		var major, minor uint32
		if _, err := fmt.Sscanf(line, "%s %s %c%d:%d", &module, &name, &kind, &major, &minor); err != nil {
			continue // a comment
		}
		path, mode := filepath.Join(folder, name), uint32(unix.S_IFCHR|0o600)
		if kind == 'b' {
			mode = unix.S_IFBLK | 0o600
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := unix.Mknod(path, mode, int(unix.Mkdev(major, minor))); err != nil && err != unix.EEXIST {
			return fmt.Errorf("make %s: %w", path, err)
		}
	}
	return nil
}

func mount(what, path, kind string, flags uintptr, data string) error {
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(what, path, kind, flags, data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", what, path, err)
	}
	return nil
}

func bringUpLoopback() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, lo)
}

// runCommand also reaps the command's orphaned children, as a first process must.
func runCommand(j job) (status int, err error) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		return 0, err
	}
	process, err := os.StartProcess(j.Command[0], j.Command,
		&os.ProcAttr{Dir: j.Dir, Env: j.Env, Files: []*os.File{null, os.Stdout, os.Stderr}})
	if err != nil {
		return 0, err
	}
	for {
		var ended unix.WaitStatus
		pid, err := unix.Wait4(-1, &ended, 0, nil)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return 0, err
		case pid != process.Pid:
		case ended.Signaled():
			return 0, fmt.Errorf("%s ended by %v", j.Command[0], ended.Signal())
		default:
			return ended.ExitStatus(), nil
		}
	}
}
