// megatron chat: a conversation in the terminal, with a model or with a server.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <csignal>
#include <cstdio>

#include "megatron/base/check.h"
#include "megatron/base/files.h"
#include "megatron/base/format.h"
#include "megatron/base/log.h"
#include "megatron/base/parse.h"
#include "megatron/serving/api_server.h"
#include "megatron/serving/client/chat_client.h"
#include "tools/support/api_key.h"
#include "tools/support/served_model_flags.h"

namespace megatron {
namespace {

struct ChatConfig : Config {
  std::string url;
  std::string model;
  std::string system;
  std::optional<double> temperature, top_p;
  std::optional<int64_t> max_tokens, seed;
  std::string api_key_file;
  std::string ca_file;

  void fields(FieldVisitor& v) override {
    v.group("chat");
    v.field("url", url,
            "a server of the OpenAI API (http://127.0.0.1:8000), in place of a model to load");
    v.field("model", model, "name of the model or adapter; default: the server's first");
    v.field("system", system, "a system message at the start");
    v.field("temperature", temperature, "0: the likeliest token each time; default: the server's");
    v.field("top_p", top_p, "share of probability that tokens are drawn from");
    v.field("max_tokens", max_tokens, "tokens of a reply at most");
    v.field("seed", seed, "seed of the draws");
    v.field("api_key_file", api_key_file, "a file with the key for the server");
    v.field("ca_file", ca_file, "PEM file of the authorities for https; default: the system's");
  }
};

std::atomic<bool> interrupted{false};

// SIGINT ends a reply, or a line; without a reply it ends the program.
class InterruptHandler {
 public:
  InterruptHandler() {
    struct sigaction action{};
    action.sa_handler = [](int) { interrupted = true; };
    sigaction(SIGINT, &action, &before_);  // without SA_RESTART: a read ends
  }
  ~InterruptHandler() { sigaction(SIGINT, &before_, nullptr); }

 private:
  struct sigaction before_{};
};

void write_now(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

// Lines of standard input.
class LineReader {
 public:
  // Null: the end of the input, or an interrupt.
  std::optional<std::string> next() {
    for (;;) {
      if (const size_t end = pending_.find('\n'); end != std::string::npos) {
        std::string line = pending_.substr(0, end);
        pending_.erase(0, end + 1);
        if (line.ends_with('\r')) line.pop_back();
        return line;
      }
      if (ended_ || interrupted) {
        if (interrupted || pending_.empty()) return std::nullopt;
        return std::exchange(pending_, {});
      }
      char buffer[4096];
      const ssize_t bytes = ::read(STDIN_FILENO, buffer, sizeof buffer);
      if (bytes > 0)
        pending_.append(buffer, static_cast<size_t>(bytes));
      else if (bytes == 0)
        ended_ = true;
    }
  }

 private:
  std::string pending_;
  bool ended_ = false;
};

constexpr uint64_t kMostMediumBytes = 64 << 20;  // as a server takes

constexpr char kHelp[] =
    "/new            forget the conversation\n"
    "/undo           take back the last message and its reply\n"
    "/system TEXT    set the system message; without text: none\n"
    "/image FILE     show the model an image with the next message; /audio FILE: a sound\n"
    "/set NAME VALUE temperature, top_p, max_tokens, seed or model; without value: the default\n"
    "/quit           end, as do Ctrl-D and Ctrl-C; Ctrl-C within a reply ends the reply\n"
    "A line that ends in \\ goes on in the next one.";

class Terminal {
 public:
  Terminal(ChatClient& client, bool interactive) : client_(client), interactive_(interactive) {}

  void run() {
    if (interactive_)
      print_line(cat(client_.settings().model, " at ", client_.url().host_header(),
                     "; /help lists commands"));
    for (;;) {
      interrupted = false;
      const auto message = read_message();
      if (!message) break;
      if (message->empty() || attach(*message)) continue;
      if (message->starts_with('/') && interactive_) {
        if (*message == "/quit" || *message == "/exit") return;
        obey(*message);
      } else {
        answer(*message);
      }
    }
    if (interactive_) print_line("");
  }

 private:
  std::optional<std::string> read_message() {
    std::string message;
    if (interactive_) write_now("> ");
    for (;;) {
      const auto line = lines_.next();
      if (!line) return std::nullopt;
      if (!line->ends_with('\\')) return message + *line;
      message += line->substr(0, line->size() - 1) + "\n";
      if (interactive_) write_now("  ");
    }
  }

  // Whether the line names a medium, which goes with the next message.
  bool attach(const std::string& line) {
    const bool image = line.starts_with("/image ");
    if (!image && !line.starts_with("/audio ")) return false;
    try {
      client_.attach(image ? MediaKind::kImage : MediaKind::kSound,
                     read_file(line.substr(line.find(' ') + 1), kMostMediumBytes));
      if (interactive_) print_line("[with the next message]");
    } catch (const Error& error) {
      if (!interactive_) throw;
      print_line(cat("[", error.what(), "]"));
    }
    return true;
  }

  void answer(const std::string& message) {
    const ChatReply reply = client_.say(message, interrupted, write_now);
    if (!reply.text.empty()) write_now("\n");
    if (!reply.problem.empty()) {
      if (!interactive_) throw_error(reply.problem);
      print_line(cat("[", reply.problem, "]"));
    } else if (reply.finish_reason == "length") {
      const char* const note = "cut: no more tokens were allowed";
      interactive_ ? print_line(cat("[", note, "]")) : log_info(note);
    }
    if (interactive_ && reply.problem.empty() && reply.output_tokens > 1)
      print_line(cat("[", reply.output_tokens, " tokens, ",
                     format_fixed(static_cast<double>(reply.output_tokens - 1) /
                                      std::max(1e-9, reply.seconds - reply.first_token_s),
                                  1),
                     " per second, first after ", format_fixed(reply.first_token_s, 2), " s]"));
  }

  void obey(const std::string& line) {
    const size_t blank = line.find(' ');
    const std::string command = line.substr(0, blank);
    std::string rest = blank == std::string::npos ? "" : line.substr(blank + 1);
    if (command == "/help") {
      print_line(kHelp);
    } else if (command == "/new") {
      client_.forget();
      print_line("[a new conversation]");
    } else if (command == "/undo") {
      print_line(client_.undo() ? "[taken back]" : "[there is nothing to take back]");
    } else if (command == "/system") {
      client_.settings().system = rest;
      print_line(rest.empty() ? "[no system message]" : "[set]");
    } else if (command == "/set") {
      const size_t space = std::min(rest.find(' '), rest.size());
      print_line(
          set(rest.substr(0, space), space < rest.size() ? rest.substr(space + 1) : std::string())
              ? "[set]"
              : "[/set takes temperature, top_p, max_tokens, seed or model, and a value]");
    } else {
      print_line(cat("[there is no command ", command, "; /help lists them]"));
    }
  }

  template <class T>
  static bool read_value(const std::string& text, std::optional<T>& out) {
    if (text.empty()) {
      out.reset();
      return true;
    }
    T value{};
    const auto read = std::from_chars(text.data(), text.data() + text.size(), value);
    if (read.ec != std::errc() || read.ptr != text.data() + text.size()) return false;
    out = value;
    return true;
  }
  bool set(const std::string& name, const std::string& value) {
    ChatSettings& settings = client_.settings();
    if (name == "temperature") return read_value(value, settings.temperature);
    if (name == "top_p") return read_value(value, settings.top_p);
    if (name == "max_tokens") return read_value(value, settings.max_tokens);
    if (name == "seed") return read_value(value, settings.seed);
    if (name != "model") return false;
    settings.model = value.empty() && !client_.models().empty() ? client_.models()[0] : value;
    return !settings.model.empty();
  }

  ChatClient& client_;
  bool interactive_;
  LineReader lines_;
};

// A server of this process alone for the model of --load.
struct LocalServer {
  ParallelGroups groups;
  std::unique_ptr<ModelService> service;
  std::unique_ptr<ApiServer> server;

  LocalServer(const ServedModelConfig& load, const EngineConfig& engine) {
    ServeConfig config;
    config.port = 0;
    config.chat_page = false;
    service = load_served_model(load, engine, groups);
    server =
        std::make_unique<ApiServer>(config, ServeLimits(), service->engine(), service->model());
    service->start();
    server->start();
  }
  ~LocalServer() {
    if (server) server->stop();
    if (service) service->stop();
  }
};

}  // namespace

extern "C" int megatron_chat(int argc, char** argv) {
  ChatConfig config;
  ServedModelConfig load;
  load.required = false;
  EngineConfig engine;
  engine.max_requests = 1;
  Config* const configs[] = {&config, &load, &engine};
  if (!parse_or_help("megatron chat --url URL|--load DIR [flags]", configs, argc, argv,
                     {.known = known_inference_flags(),
                      .validate = [&](Violations& v) { require_url_or_load(config.url, load, v); },
                      .positional = "load"}))
    return 0;
  std::optional<LocalServer> local;
  if (config.url.empty()) local.emplace(load, engine);
  ChatClient client(parse_url(local ? local->server->url() : config.url), config.ca_file,
                    read_api_key(config.api_key_file),
                    {.model = config.model,
                     .system = config.system,
                     .temperature = config.temperature,
                     .top_p = config.top_p,
                     .max_tokens = config.max_tokens,
                     .seed = config.seed});
  const InterruptHandler handler;
  Terminal(client, isatty(STDIN_FILENO) != 0).run();
  return 0;
}

}  // namespace megatron
