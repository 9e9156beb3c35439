package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// job is the input of the guest.
type job struct {
	Command []string
	Dir     string
	Env     []string
	Modules string // folder of all modules of the kernel, on the host
	Write   string // writable folder of the host; optional
}

// exitPort is the I/O port to which the guest writes its exit status plus one; qemu then exits with twice that value
// plus one.
const exitPort = 0x501

// noAnswer is the exit status if the command's exit status is unknown.
const noAnswer = 125

func main() {
	if os.Getpid() == 1 {
		guest()
	}
	kernel := flag.String("kernel", "", "`folder` of an unpacked kernel package (.ci/kernel makes one)")
	limit := flag.Duration("limit", 20*time.Minute, "power the machine off after this `time`")
	write := flag.String("write", "", "`folder` of this machine that the command may write to")
	accel := flag.String("accel", "tcg,thread=multi", "qemu's `accelerator`; kvm is faster where it works")
	memory := flag.String("memory", "2G", "`size` of the machine's memory")
	cpus := flag.Int("cpus", 2, "number of CPUs of the machine")
	flag.Usage = func() {
		fmt.Fprintln(os.Stderr, "usage: vm -kernel FOLDER [flags] COMMAND [ARGUMENT ...]")
		flag.PrintDefaults()
	}
	flag.Parse()
	if *kernel == "" || flag.NArg() == 0 {
		flag.Usage()
		os.Exit(2)
	}
	status, err := run(*kernel, *write, *limit, flag.Args(), "-accel", *accel, "-m", *memory, "-smp", fmt.Sprint(*cpus))
	if err != nil {
		fmt.Fprintf(os.Stderr, "error: %v\n", err)
		status = noAnswer
	}
	os.Exit(status)
}

func run(kernel, write string, limit time.Duration, command []string, machine ...string) (status int, err error) {
	kernel, err = filepath.Abs(kernel)
	if err != nil {
		return 0, err
	}
	images, err := filepath.Glob(filepath.Join(kernel, "boot", "vmlinuz-*"))
	if err != nil || len(images) != 1 {
		return 0, fmt.Errorf("%s has %d kernels, want one; .ci/kernel creates such a folder", kernel, len(images))
	}
	if command[0], err = exec.LookPath(command[0]); err != nil {
		return 0, err
	}
	dir, err := os.Getwd()
	if err != nil {
		return 0, err
	}
	work, err := os.MkdirTemp("", "vm")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(work)
	if write != "" {
		if write, err = filepath.Abs(write); err != nil {
			return 0, err
		}
		machine = append(machine, "-fsdev", "local,id=write,security_model=none,path="+write, "-device",
			"virtio-9p-pci,fsdev=write,mount_tag=write")
	}
	initramfs, messages := filepath.Join(work, "initramfs"), filepath.Join(work, "messages")
	modules := filepath.Join(kernel, "lib", "modules")
	j := job{Command: command, Dir: dir, Env: os.Environ(), Modules: modules, Write: write}
	if err := writeInitramfs(initramfs, modules, j); err != nil {
		return 0, fmt.Errorf("write the initramfs: %w", err)
	}

	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	qemu := exec.CommandContext(ctx, "qemu-system-x86_64", append(machine,
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-cpu", "max,la57=off",
		"-kernel", images[0], "-initrd", initramfs, "-append", "console=ttyS0 quiet loglevel=4 panic=-1 no_timer_check",
		"-fsdev", "local,id=files,path=/,security_model=none,readonly=on,multidevs=remap",
		"-device", "virtio-9p-pci,fsdev=files,mount_tag=files",
		"-device", fmt.Sprintf("isa-debug-exit,iobase=%#x,iosize=1", exitPort),
		"-serial", "file:"+messages, "-chardev", "stdio,id=output,signal=off", "-serial", "chardev:output")...)
	var complaints bytes.Buffer
	qemu.Stdout, qemu.Stderr = os.Stdout, &complaints
	// If this program is killed, for example by `go test` after a timeout, the virtual machine stops too.
	qemu.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	err = qemu.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() > 1 {
		return exit.ExitCode()>>1 - 1, nil
	}
	said, _ := os.ReadFile(messages)
	switch {
	case ctx.Err() != nil:
		err = fmt.Errorf("the command was not done after %v; the machine was powered off", limit)
	case err != nil:
		err = fmt.Errorf("qemu: %w: %s", err, bytes.TrimSpace(complaints.Bytes()))
	default:
		err = errors.New("the machine ended without the command's exit status")
	}
	return 0, fmt.Errorf("%w; the kernel's last messages:\n%s", err, tail(said, 4000))
}

func tail(b []byte, n int) []byte { return b[max(0, len(b)-n):] }

// writeInitramfs writes an initramfs with this program as /init, the modules that it needs to mount the host's files,
// and its job.
func writeInitramfs(path, modules string, j job) (err error) {
	versions, err := os.ReadDir(modules)
	if err != nil || len(versions) != 1 {
		return fmt.Errorf("%s has the modules of %d kernels, want one: %w", modules, len(versions), err)
	}
	folder := filepath.Join(modules, versions[0].Name())
	index, err := os.ReadFile(filepath.Join(folder, "modules.dep"))
	if err != nil {
		return err
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	a := archive{w: f}
	for _, name := range []string{"modules", "dev", "proc", "files", "own", "root"} {
		a.folder(name)
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	program, err := os.Open(self)
	if err != nil {
		return err
	}
	defer program.Close()
	binary, err := io.ReadAll(program)
	if err != nil {
		return err
	}
	a.file("init", binary)
	for i, module := range loadOrder(index, "virtio_pci", "9pnet_virtio", "9p", "overlay") {
		object, err := unpacked(filepath.Join(folder, module))
		if err != nil {
			return err
		}
		a.file(fmt.Sprintf("modules/%03d", i), object)
	}
	a.json("job", j)
	a.end()
	return a.err
}

func unpacked(module string) ([]byte, error) {
	if filepath.Ext(module) != ".xz" {
		return os.ReadFile(module)
	}
	out, err := exec.Command("xz", "-dc", module).Output()
	if err != nil {
		return nil, fmt.Errorf("unpack %s: %w", module, err)
	}
	return out, nil
}
